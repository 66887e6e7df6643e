from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from deepseek_triton.build import pipeline
from deepseek_triton.build.engine_dir import load_engine_dir
from deepseek_triton.build.pipeline import build_engine, is_current
from deepseek_triton.build.targets import ONNXRUNTIME_GPU
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.errors import CheckpointError, ConfigError
from tests.unit.quantize.stored import AWQ_CONFIG, awq, write_int4_checkpoints

SCRIPT = Path(__file__).parents[3] / "build_scripts" / "build_engine.py"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_random_checkpoint(tmp_path / "checkpoint", preset_config("v2-lite"))


def test_the_manifest_tells_what_was_built(checkpoint: Path, tmp_path: Path) -> None:
    manifest = build_engine(checkpoint, tmp_path / "engine", block_size=32)
    assert load_engine_dir(tmp_path / "engine", target="onnxruntime").manifest == manifest
    assert manifest.precision == "fp32"
    assert manifest.kv_cache.block_size == 32
    assert manifest.kv_cache.width == 64 + 16
    assert manifest.kv_cache.num_layers == 4
    assert manifest.max_context_len == 4096
    assert manifest.checkpoint.name == "checkpoint"
    assert set(manifest.versions) == {"deepseek-triton", "onnx", "onnxruntime"}
    assert {e.name for e in manifest.files} == set(os.listdir(tmp_path / "engine")) - {
        "manifest.json"
    }
    for name in manifest.tokenizer_files:
        assert (tmp_path / "engine" / name).read_bytes() == (checkpoint / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": "tpu"}, "TARGET: 'tpu' is unknown; choose one of onnxruntime"),
        ({"precision": "fp4"}, "PRECISION: 'fp4' is not available for onnxruntime; .*fp32"),
        ({"block_size": 0}, "block_size: 0"),
        ({"provider": "rocm"}, "PROVIDER: onnxruntime has no provider 'rocm'; choose cpu or cuda"),
        ({"target": "cuda", "provider": "cpu"}, "PROVIDER: cuda has no provider 'cpu'; leave it"),
        ({"provider": "cuda", "draft": True}, "DRAFT: onnxruntime with PROVIDER=cuda cannot use"),
        ({"provider": "cuda", "int4_accuracy_level": 4}, "INT4_ACCURACY: .*PROVIDER=cuda has no"),
    ],
)
def test_a_choice_that_does_not_exist_is_named(
    checkpoint: Path, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_engine(checkpoint, tmp_path / "engine", **arguments)
    assert not (tmp_path / "engine").exists()


def test_the_provider_is_in_the_manifest_and_shapes_the_engine(
    checkpoint: Path, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    manifest = build_engine(checkpoint, engine, precision="fp16", provider="cuda")
    assert load_engine_dir(engine).manifest.provider == "cuda"
    assert (manifest.kv_cache.dtype, manifest.kv_cache.itemsize) == ("float16", 2)
    assert manifest.versions["onnxruntime-gpu"] == ONNXRUNTIME_GPU
    assert is_current(engine, checkpoint, precision="fp16", provider="cuda")
    assert not is_current(engine, checkpoint, precision="fp16")
    assert build_engine(checkpoint, engine).provider == "cpu"
    assert is_current(engine, checkpoint)
    # An engine from before there was a choice is one for the CPU.
    path = engine / "manifest.json"
    path.write_text(path.read_text().replace('"provider": "cpu"', '"provider": null'))
    assert is_current(engine, checkpoint)
    assert not is_current(engine, checkpoint, provider="cuda")


def test_a_bad_checkpoint_changes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    build_engine(checkpoint, tmp_path / "engine")
    os.truncate(checkpoint / "model.safetensors", 100_000)
    with pytest.raises(CheckpointError, match="model.safetensors"):
        build_engine(checkpoint, tmp_path / "engine")
    load_engine_dir(tmp_path / "engine")
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "engine"]


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        build_engine(tmp_path / "nowhere", tmp_path / "engine")


def test_an_interrupted_build_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "_copy_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_engine(checkpoint, tmp_path / "engine")
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_an_engine_is_current_until_anything_it_was_made_from_changes(
    checkpoint: Path, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    assert not is_current(engine, checkpoint)
    build_engine(checkpoint, engine)
    assert is_current(engine, checkpoint)
    assert not is_current(engine, checkpoint, block_size=32)
    weights = checkpoint / "model.safetensors"
    os.utime(weights, ns=(0, 0))
    assert not is_current(engine, checkpoint)
    build_engine(checkpoint, engine)
    assert is_current(engine, checkpoint)
    os.truncate(engine / "weights.bin", 10)
    assert not is_current(engine, checkpoint)


def test_a_draft_needs_the_architecture_that_has_one(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="DRAFT: a deepseek_v2 model has no multi-token-pred"):
        build_engine(checkpoint, tmp_path / "engine", draft=True)
    assert not (tmp_path / "engine").exists()


def test_a_draft_needs_the_layer(tmp_path: Path) -> None:
    checkpoint = write_random_checkpoint(tmp_path / "checkpoint", preset_config("v3"))
    with pytest.raises(ConfigError, match="DRAFT: .* has no multi-token-prediction layer"):
        build_engine(checkpoint, tmp_path / "engine", draft=True)


MEASURE = """
import sys
from pathlib import Path
from deepseek_triton.build.pipeline import build_engine

def peak_kilobytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

before = peak_kilobytes()
build_engine(Path(sys.argv[1]), Path(sys.argv[2]))
print(peak_kilobytes() - before)
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    config = preset_config("v2-lite") | {
        "num_hidden_layers": 12,
        "hidden_size": 512,
        "intermediate_size": 4096,
        "moe_intermediate_size": 1024,
        "num_experts_per_tok": 2,
    }
    write_random_checkpoint(tmp_path / "checkpoint", config)
    total = (tmp_path / "checkpoint" / "model.safetensors").stat().st_size
    assert total > 700e6
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path / "checkpoint", tmp_path / "engine"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert int(output) * 1024 < 300e6


def run_script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_script_builds_and_says_what(checkpoint: Path, tmp_path: Path) -> None:
    done = run_script("--checkpoint", checkpoint, "--engine", tmp_path / "engine")
    assert done.returncode == 0
    assert done.stderr.startswith("INFO: graph: ") and done.stderr.count("\n") == 1
    assert "onnxruntime engine, fp32" in done.stdout
    load_engine_dir(tmp_path / "engine")


def test_the_script_answers_an_error_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for arguments, message in (
        (("--engine", tmp_path / "e", "--target", "x"), "error: TARGET: 'x' is unknown"),
        (("--engine", tmp_path / "file"), "not an engine directory"),
        (("--engine", tmp_path / "file" / "e"), "cannot write engine directory"),
    ):
        done = run_script("--checkpoint", checkpoint, *arguments)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert message in done.stderr


def test_empty_arguments_give_the_usage(tmp_path: Path) -> None:
    done = run_script("--checkpoint", "", "--engine", tmp_path / "engine")
    assert done.returncode == 2
    assert done.stderr == "usage: make engine CHECKPOINT=<folder> ENGINE=<folder>\n"


def test_a_checkpoint_whose_tokenizer_cannot_serve_is_refused_first(
    checkpoint: Path, tmp_path: Path
) -> None:
    (checkpoint / "tokenizer.json").unlink()
    done = run_script("--checkpoint", checkpoint, "--engine", tmp_path / "engine")
    assert done.returncode == 1
    assert "tokenizer.json" in done.stderr
    assert not (tmp_path / "engine").exists()


def test_an_engine_without_a_tokenizer_is_never_built(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not found"):
        build_engine(checkpoint, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_the_script_says_that_the_folder_does_not_exist(tmp_path: Path) -> None:
    done = run_script("--checkpoint", tmp_path / "nowhere", "--engine", tmp_path / "engine")
    assert done.returncode == 1
    assert "nowhere: the folder does not exist" in done.stderr


@pytest.mark.parametrize(("target", "precision"), [("onnxruntime", "fp32"), ("cuda", "bf16")])
def test_an_int4_checkpoint_with_a_scale_that_is_not_finite_is_not_built(
    tmp_path: Path, target: str, precision: str
) -> None:
    config = preset_config("v2-lite") | {"num_hidden_layers": 2}
    folder, _ = write_int4_checkpoints(tmp_path, config, AWQ_CONFIG, awq)
    reader = CheckpointReader(folder)
    tensors = {name: np.array(reader.read(name)) for name in reader.names()}
    name = "model.layers.1.mlp.experts.1.down_proj.scales"
    tensors[name][0, 3] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} has 1 scales that are not finite"):
        build_engine(folder, tmp_path / "engine", target=target, precision=precision)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "int4", "dense"}
