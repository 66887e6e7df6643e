"""Half precision on ONNX Runtime: narrow on disk, float32 in every sum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from deepseek_triton.build.ort_precision import widen
from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.errors import BuildError
from deepseek_triton.export.precision import find_precision
from deepseek_triton.request import RequestKey
from deepseek_triton.runner.base import StepRow
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner

IDS = np.random.default_rng(0).integers(3, 4000, 40).astype(np.int32)
FLOAT, HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("half") / "checkpoint"
    return write_random_checkpoint(folder, preset_config("v2-lite"))


@contextmanager
def runner_of(checkpoint: Path, engine: Path, precision: str) -> Iterator[OnnxRuntimeRunner]:
    build_engine(checkpoint, engine, precision=precision)
    runner = OnnxRuntimeRunner.load(engine, num_blocks=8, num_threads=1)
    yield runner
    runner.close()


def log_probs(runner: OnnxRuntimeRunner) -> NDArray[np.float32]:
    row = StepRow(RequestKey("r"), IDS[:-1], 0, np.arange(3, dtype=np.int32), None)
    return runner.score((row,))[0].log_probs[:-1]


def rewrite_weights(source: Path, out: Path, change: Any) -> Path:
    """Copy a checkpoint, its tensors passed through `change`."""
    out.mkdir()
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            tensors = {name: change(name, array) for name, array in load_file(file).items()}
            save_file(tensors, out / file.name)
        else:
            (out / file.name).write_bytes(file.read_bytes())
    return out


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_engine_computes_in_float32_with_rounded_weights(
    checkpoint: Path, tmp_path: Path, precision: str
) -> None:
    dtype = find_precision(precision).dtype

    def rounded(name: str, array: NDArray[Any]) -> NDArray[Any]:
        kept = "mlp.gate." in name  # routers are float32 in every precision
        return array if kept else array.astype(dtype).astype(np.float32)

    exact = rewrite_weights(checkpoint, tmp_path / "rounded", rounded)
    with runner_of(exact, tmp_path / "wide", "fp32") as runner:
        expected = log_probs(runner)
    with runner_of(checkpoint, tmp_path / "narrow", precision) as runner:
        assert runner.kv_cache_spec.dtype == "float32"
        np.testing.assert_array_equal(log_probs(runner), expected)
    sizes = [(tmp_path / n / "weights.bin").stat().st_size for n in ("narrow", "wide")]
    assert sizes[0] < 0.52 * sizes[1]


def test_a_weight_beyond_fp16_is_named_and_bf16_takes_it(checkpoint: Path, tmp_path: Path) -> None:
    def enlarged(name: str, array: NDArray[Any]) -> NDArray[Any]:
        if name == "model.layers.1.self_attn.o_proj.weight":
            array[3, 5] = 70000.0
        return array

    large = rewrite_weights(checkpoint, tmp_path / "large", enlarged)
    with pytest.raises(BuildError, match=r"layers\.1\.self_attn\.o_proj\.weight: .*PRECISION=bf16"):
        build_engine(large, tmp_path / "engine", precision="fp16")
    assert not (tmp_path / "engine").exists()
    build_engine(large, tmp_path / "engine", precision="bf16")


def test_a_float32_graph_stays_as_it_is() -> None:
    graph = onnx.parser.parse_graph(
        "g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Add(x, w) }"
    )
    before = graph.SerializeToString()
    widen(graph)
    assert graph.SerializeToString() == before


def test_half_inputs_outputs_and_initializers_become_float32() -> None:
    graph = onnx.parser.parse_graph(
        "g (float16[2] x) => (float16[2] y) <float16[2] w = {1, 2}> { y = Add(x, w) }"
    )
    widen(graph)
    types = [v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)]
    assert types == [FLOAT, FLOAT]
    assert [tensor.data_type for tensor in graph.initializer] == [HALF]
    onnx.checker.check_graph(graph)
    assert [node.op_type for node in graph.node] == ["Cast", "Add"]
