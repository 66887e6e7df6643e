"""Scales folded into a model leave its function as it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.calibrate.groups import Folding, experts, linear_modules, scale_groups
from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.presets import PRESETS, preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.request import RequestKey
from deepseek_triton.runner.base import StepRow
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner

IDS = np.random.default_rng(0).integers(3, 4000, 40).astype(np.int32)


def log_probs(checkpoint: Path) -> NDArray[np.float32]:
    engine = checkpoint.with_name(checkpoint.name + "-engine")
    build_engine(checkpoint, engine)
    runner = OnnxRuntimeRunner.load(engine, num_blocks=4, num_threads=1)
    row = StepRow(RequestKey("r"), IDS[:-1], 0, np.arange(3, dtype=np.int32), None)
    found = runner.score((row,))[0].log_probs[:-1]
    runner.close()
    return found


@pytest.mark.parametrize("arch", PRESETS)
def test_random_scales_on_every_group_change_nothing(tmp_path: Path, arch: str) -> None:
    source = write_random_checkpoint(tmp_path / "source", preset_config(arch))
    expected = log_probs(source)
    spec = read_model_spec(source)
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    rng = np.random.default_rng(1)
    changed = 0
    for layer in range(spec.num_layers):
        folding = Folding()
        groups = [*scale_groups(spec, layer), *(e.down for e in experts(spec, layer))]
        for group in groups:
            by_row = np.exp2(rng.uniform(-2, 2, len(tensors[group.maker]))).astype(np.float32)
            folding.add(group, by_row[group.rows], len(by_row))
        for name in [name for name in tensors if folding.changes(name)]:
            tensors[name] = folding.apply(name, tensors[name])
            changed += 1
    assert changed > 8 * spec.num_layers
    folder = tmp_path / "folded"
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    save_file(tensors, folder / file.name)
    found = log_probs(folder)
    assert np.ptp(expected) > 0.1, "the model is too flat to tell"
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


def test_all_linear_layers_but_router_kv_b_and_head_are_quantised(tmp_path: Path) -> None:
    source = write_random_checkpoint(tmp_path / "source", preset_config("v3"))
    spec = read_model_spec(source)
    (file,) = source.glob("*.safetensors")
    two_dimensional = {n for n, a in load_file(file).items() if a.ndim == 2}
    modules = {m for layer in range(spec.num_layers) for m in linear_modules(spec, layer)}
    left = two_dimensional - {m + ".weight" for m in modules}
    kinds = {name.split(".")[-2] for name in left}
    assert kinds == {"gate", "kv_b_proj", "lm_head", "embed_tokens"}
    assert json.loads((source / "config.json").read_text())["n_routed_experts"] == 16
    assert len(modules) == 4 * (4 + 3) + 3 * 16 * 3
