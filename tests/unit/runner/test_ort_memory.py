from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import onnx
import pytest

from deepseek_triton.build.engine_dir import EngineDir, load_engine_dir
from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.calibrate.quantize import QuantizeOptions, quantize_checkpoint
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.errors import EngineMismatchError
from deepseek_triton.runner import ort_memory
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
from deepseek_triton.runner.ort_memory import memory_for_weights, require_memory
from deepseek_triton.server.__main__ import main

UINT8 = onnx.TensorProto.UINT8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "checkpoint"
    return write_random_checkpoint(folder, preset_config("v2-lite"), dtype="bfloat16")


def engine_of(checkpoint: Path, folder: Path, precision: str, target: str) -> EngineDir:
    build_engine(checkpoint, folder, precision=precision, target=target)
    return load_engine_dir(folder)


@pytest.fixture(scope="module")
def half(checkpoint: Path) -> EngineDir:
    return engine_of(checkpoint, checkpoint.with_name("half"), "fp16", "onnxruntime")


def values(checkpoint: Path, *parts: str) -> int:
    reader = CheckpointReader(checkpoint)
    names = [name for name in reader.names() if not parts or any(part in name for part in parts)]
    return sum(math.prod(reader.shape(name)) for name in names)


def test_half_precision_is_widened(checkpoint: Path, half: EngineDir) -> None:
    assert memory_for_weights(half) == pytest.approx(4 * values(checkpoint), rel=0.01)


def test_float32_that_is_read_from_the_file_does_not_count(
    checkpoint: Path, tmp_path: Path
) -> None:
    single = engine_of(checkpoint, tmp_path / "single", "fp32", "onnxruntime")
    mapped = values(checkpoint, "embed_tokens", ".mlp.experts.")
    expected = 4 * (values(checkpoint) - mapped)
    assert memory_for_weights(single) == pytest.approx(expected, rel=0.01)


def test_int4_counts_as_it_is_stored(checkpoint: Path, tmp_path: Path) -> None:
    quantize_checkpoint(checkpoint, tmp_path / "int4", QuantizeOptions("rtn", 32), [])
    packed = engine_of(tmp_path / "int4", tmp_path / "packed", "fp32", "onnxruntime")
    stored = sum(entry.size for entry in packed.manifest.files if entry.name.endswith(".bin"))
    graph = onnx.load_model(packed.model_path, load_external_data=False).graph
    codes = sum(math.prod(t.dims) for t in graph.initializer if t.data_type == UINT8)
    assert 0 < codes < memory_for_weights(packed) < stored


def test_a_gpu_keeps_weights_elsewhere(checkpoint: Path, tmp_path: Path) -> None:
    assert memory_for_weights(engine_of(checkpoint, tmp_path / "e", "bf16", "cuda")) == 0


def test_too_little_memory_is_told_before_the_weights_are_read(
    half: EngineDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    needed = memory_for_weights(half)
    monkeypatch.setattr(ort_memory, "available_memory", lambda: needed)
    require_memory(half)
    monkeypatch.setattr(ort_memory, "available_memory", lambda: needed - 1)
    message = r"half: its weights, which .* float32, take 0\.0 GB of memory, 0\.0 GB are available"
    with pytest.raises(EngineMismatchError, match=message):
        require_memory(half)
    with pytest.raises(EngineMismatchError, match=message):
        OnnxRuntimeRunner(half, num_blocks=1)
    monkeypatch.setattr("deepseek_triton.server.__main__.configure_logging", lambda: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    assert main(["--engine", str(half.path)]) == 1
    assert "its weights, which" in caplog.text
    assert "tritonserver" not in caplog.text


def test_a_machine_that_does_not_tell_its_memory_is_given_a_try(
    half: EngineDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort_memory, "available_memory", lambda: 0)
    require_memory(half)
    other = dataclasses.replace(half.manifest, provider="cuda")
    assert memory_for_weights(EngineDir(half.path, other)) == 0
