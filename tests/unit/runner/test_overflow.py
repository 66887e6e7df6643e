"""A token whose activations overflow ends its request, wherever in a prompt it is; on every runner.

The one token is LOUD, whose embedding is changed. Its norms are 0 or NaN, so without a check a
later token would get finite logits all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from deepseek_triton.build.engine_dir import load_engine_dir
from deepseek_triton.build.limits import CallLimits
from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.calibrate.quantize import QuantizeOptions, quantize_checkpoint
from deepseek_triton.checkpoint.names import EMBEDDING
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.config import SchedulerConfig
from deepseek_triton.engine.engine import StepEngine
from deepseek_triton.request import FinishReason, Request, RequestKey, SamplingParams
from deepseek_triton.runner.base import ModelRunner, RowSampling, StepRow
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
from deepseek_triton.runner.onnxruntime_cuda import OnnxRuntimeCudaRunner
from deepseek_triton.runner.tensorrt import TensorRTRunner
from tests.unit.engine.scripted_runner import Collector
from tests.unit.runner.fake_tensorrt import FakeDevice, fake_tensorrt

LOUD, CHUNK, NUM_BLOCKS = 77, 16, 64
NO_TOKENS = np.zeros(0, np.int32)
GREEDY = RowSampling(SamplingParams(), 0.0, None, NO_TOKENS, NO_TOKENS)
DRAWING = replace(GREEDY, params=SamplingParams(temperature=1.0, return_log_probs=True))
LIMITS = CallLimits(max_batch_size=4, max_prefill_rows=2, max_chunk_len=16, max_context_len=160)


def write_checkpoint(
    folder: Path, preset: str, value: float, *, token: int = LOUD, int4: bool = False
) -> Path:
    """A random checkpoint in which `token` is embedded as `value`, beyond what squares can be."""
    config = preset_config(preset) | {"num_hidden_layers": 2}
    checkpoint = write_random_checkpoint(folder / "checkpoint", config)
    if int4:
        options = QuantizeOptions("rtn", 32, False)
        quantize_checkpoint(checkpoint, folder / "int4", options, [])
        checkpoint = folder / "int4"
    (file,) = [f for f in checkpoint.glob("*.safetensors") if EMBEDDING in load_file(f)]
    tensors = load_file(file)
    tensors[EMBEDDING][token] = value
    save_file(tensors, file)
    return checkpoint


def open_cuda(path: Path, **options: Any) -> ModelRunner:
    pytest.importorskip("torch")
    from deepseek_triton.runner.cuda import CudaRunner

    limits = {"num_blocks": NUM_BLOCKS, "max_batch_size": 4}
    return CudaRunner.open(load_engine_dir(path), device="cpu", **limits, **options)


def open_cpu(path: Path) -> ModelRunner:
    return OnnxRuntimeRunner.load(path, num_blocks=NUM_BLOCKS, num_threads=1)


def open_tensorrt(path: Path) -> ModelRunner:
    return TensorRTRunner(load_engine_dir(path), num_blocks=NUM_BLOCKS, device=FakeDevice())


def open_onnxruntime_cuda(path: Path) -> ModelRunner:
    return OnnxRuntimeCudaRunner.load(path, num_blocks=NUM_BLOCKS, device="cpu")


Case = tuple[dict[str, Any], Callable[[Path], ModelRunner], bool]
RUNNERS: dict[str, Case] = {
    "onnxruntime": ({}, open_cpu, False),
    "onnxruntime bf16": ({"precision": "bf16"}, open_cpu, False),
    "onnxruntime int4": ({}, open_cpu, True),
    "onnxruntime on cuda": ({"provider": "cuda"}, open_onnxruntime_cuda, False),
    "cuda": ({"target": "cuda", "block_size": 16}, open_cuda, False),
    "cuda bf16": ({"target": "cuda", "block_size": 16, "precision": "bf16"}, open_cuda, False),
    "cuda int4": ({"target": "cuda", "block_size": 16}, open_cuda, True),
    "tensorrt": ({"target": "tensorrt", "limits": LIMITS}, open_tensorrt, False),
}
# Latent attention with experts, grouped-query attention without and with them.
CASES = (
    *(("onnxruntime", "v2"), ("onnxruntime", "v3"), ("onnxruntime", "qwen2")),
    *(("onnxruntime", "moe"), ("onnxruntime bf16", "v3"), ("onnxruntime int4", "v3")),
    *(("onnxruntime on cuda", "v3"), ("onnxruntime on cuda", "qwen2")),
    *(("cuda", "v3"), ("cuda", "qwen2"), ("cuda bf16", "moe"), ("cuda int4", "v2")),
    *(("tensorrt", "v3"), ("tensorrt", "qwen2")),
)


@pytest.fixture(scope="module", autouse=True)
def tensorrt() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt", fake_tensorrt())
        yield


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tensorrt: None
) -> Iterator[ModelRunner]:
    name, preset = request.param
    options, open_runner, int4 = RUNNERS[name]
    folder = tmp_path_factory.mktemp("overflow")
    checkpoint = write_checkpoint(folder, preset, 1e25, int4=int4)
    build_engine(checkpoint, folder / "engine", **options)
    runner = open_runner(folder / "engine")
    yield runner
    runner.close()


def prompt(seed: int, length: int, loud_at: int | None = None) -> list[int]:
    ids = np.random.default_rng(seed).integers(100, 4000, length).tolist()
    if loud_at is not None:
        ids[loud_at] = LOUD
    return ids


def row(ids: list[int], block: int, begin: int, end: int, sampling: RowSampling | None) -> StepRow:
    table = np.arange(block, block + 4, dtype=np.int32)
    chosen = np.array(ids[begin:end], np.int32)
    return StepRow(RequestKey(str(block)), chosen, begin, table, sampling)


def generate(runner: ModelRunner, prompts: dict[str, list[int]]) -> dict[str, Collector]:
    """Answer the prompts together, in chunks of CHUNK tokens."""
    engine = StepEngine(runner, SchedulerConfig(max_batch_size=4, max_tokens_per_step=CHUNK))
    taken = {key: Collector() for key in prompts}
    for key, ids in prompts.items():
        engine.submit(Request(RequestKey(key), tuple(ids), 6), taken[key])
    while engine.has_requests:
        engine.step()
        engine.check_integrity()
    return taken


@pytest.mark.parametrize("loud_at", [0, 20, 38])
def test_the_request_ends_with_an_error_and_its_neighbours_get_what_they_get_alone(
    opened: ModelRunner, loud_at: int
) -> None:
    quiet = {"short": prompt(1, 5), "long": prompt(2, 23)}
    alone = {key: generate(opened, {key: ids})[key].tokens for key, ids in quiet.items()}
    taken = generate(opened, {"loud": prompt(3, 40, loud_at), **quiet})
    loud = taken.pop("loud")
    assert (loud.finish_reason, loud.tokens) == (FinishReason.ERROR, [])
    assert "most likely an overflow; build the engine with PRECISION=fp32" in str(
        loud.outputs[-1].error
    )
    assert {key: one.tokens for key, one in taken.items()} == alone
    assert all(one.finish_reason is FinishReason.LENGTH for one in taken.values())


@pytest.mark.parametrize("sampling", [GREEDY, DRAWING, None])
def test_it_is_the_chunk_with_the_token_that_fails_and_no_other_row(
    opened: ModelRunner, sampling: RowSampling | None
) -> None:
    loud = prompt(3, 40, 20)
    before = opened.run((row(loud, 0, 0, 16, None), row(prompt(1, 5), 8, 0, 5, sampling)))
    assert before.overflowed == ()
    quiet = row(prompt(2, 9), 4, 0, 9, sampling), row(prompt(2, 3), 12, 0, 3, None)
    result = opened.run((quiet[0], row(loud, 0, 16, 31, sampling), quiet[1]))
    refused = {*result.overflowed, *(i for i in (0, 1) if sampling and result.token_ids[i] < 0)}
    assert refused == {1}
    expected = opened.run((quiet[0],))
    np.testing.assert_array_equal(result.token_ids[:1], expected.token_ids)


def test_a_chunk_of_that_token_alone_fails(opened: ModelRunner) -> None:
    result = opened.run((row([LOUD, 5], 0, 0, 1, None), row(prompt(1, 5), 8, 0, 1, None)))
    assert result.overflowed == (0,)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", ["onnxruntime", "cuda", "onnxruntime on cuda"])
def test_infinities_and_nan_count_as_well(tmp_path: Path, name: str, value: float) -> None:
    options, open_runner, _ = RUNNERS[name]
    build_engine(write_checkpoint(tmp_path, "v2", value), tmp_path / "engine", **options)
    runner = open_runner(tmp_path / "engine")
    rows = (row(prompt(1, 5), 8, 0, 5, None), row(prompt(3, 40, 20), 0, 0, 40, None))
    assert runner.run(rows).overflowed == (1,)
    runner.close()
