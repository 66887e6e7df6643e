from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import helper

from deepseek_triton.build import cuda
from deepseek_triton.build.engine_dir import load_engine_dir
from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.errors import BuildError
from deepseek_triton.export.functions import DOMAIN


def test_the_engine_is_the_portable_model_with_its_calls(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "checkpoint", preset_config("v3"))
    build_engine(tmp_path / "checkpoint", tmp_path / "engine", target="cuda", precision="bf16")
    engine = load_engine_dir(tmp_path / "engine", target="cuda")
    assert engine.manifest.kv_cache.block_size == cuda.BLOCK_SIZE
    assert engine.manifest.kv_cache.dtype == "bfloat16"
    model = onnx.load(engine.model_path, load_external_data=False)
    called = {node.op_type for node in model.graph.node if node.domain == DOMAIN}
    assert {"LatentAttention", "Experts", "RouteSigmoidGrouped"} <= called
    assert {function.name for function in model.functions} >= called


def test_a_call_that_the_runner_does_not_know_is_named(tmp_path: Path) -> None:
    node = helper.make_node("Hologram", ["x"], ["y"], name="layers.0.hologram", domain=DOMAIN)
    value = [helper.make_tensor_value_info(n, 1, (1,)) for n in "xy"]
    graph = helper.make_graph([node], "g", value[:1], value[1:])
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    with pytest.raises(BuildError, match=r"layers\.0\.hologram: .* does not run Hologram"):
        cuda.build(tmp_path / "model.onnx")
