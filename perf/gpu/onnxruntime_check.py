"""Logits of ONNX Runtime's CUDA provider against its CPU provider, on small models of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from measure import GREEDY
from numpy.typing import NDArray

from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.calibrate.quantize import QuantizeOptions, quantize_checkpoint
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.request import RequestKey
from deepseek_triton.runner.base import StepRow
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
from deepseek_triton.runner.onnxruntime_cuda import OnnxRuntimeCudaRunner

BLOCK_SIZE, NUM_BLOCKS = 16, 48
_PROMPTS, _CHUNKS, _DECODES = (1, 7, 30, 150), (1, 3, 11, 64), 6
Forward = Callable[[tuple[StepRow, ...]], tuple[list[int], NDArray[np.float32]]]


def check_family(folder: Path, family: str) -> dict[str, Any]:
    """Return the errors of one architecture in each precision."""
    write_random_checkpoint(folder / "checkpoint", preset_config(family))
    expected = _on_cpu(folder)
    return {
        precision: _errors(folder, precision, expected) for precision in ("fp32", "fp16", "bf16")
    }


def check_int4(folder: Path, family: str, group_size: int) -> dict[str, Any]:
    """Return the errors of one architecture with INT4 weights."""
    write_random_checkpoint(folder / "whole", preset_config(family))
    options = QuantizeOptions("rtn", group_size, False, 1, 16)
    quantize_checkpoint(folder / "whole", folder / "checkpoint", options, ["some text " * 100])
    expected = _on_cpu(folder, int4_accuracy_level=0)
    return {precision: _errors(folder, precision, expected) for precision in ("fp16", "bf16")}


def _on_cpu(folder: Path, **options: Any) -> list[NDArray[np.float32]]:
    build_engine(folder / "checkpoint", folder / "cpu", block_size=BLOCK_SIZE, **options)
    with closing(OnnxRuntimeRunner.load(folder / "cpu", num_blocks=NUM_BLOCKS)) as runner:
        return _logits(runner.forward)


def _errors(
    folder: Path, precision: str, expected: list[NDArray[np.float32]]
) -> dict[str, Any] | str:
    engine = folder / precision
    try:
        build_engine(
            folder / "checkpoint",
            engine,
            precision=precision,
            block_size=BLOCK_SIZE,
            provider="cuda",
        )
        with closing(OnnxRuntimeCudaRunner.load(engine, num_blocks=NUM_BLOCKS)) as runner:
            _poison(runner)
            got = _logits(runner.forward)
            again = _logits(runner.forward)
            tokens = [runner.run(rows).token_ids for rows in _steps(runner.vocab_size)]
    except Exception as error:  # the other precisions go on
        return f"{type(error).__name__}: {error}"[:1500]
    scale = max(np.abs(step).max() for step in expected)
    worst = [float(np.abs(a - b).max() / scale) for a, b in zip(got, expected, strict=True)]
    best = zip(tokens, got, strict=True)
    return {
        "worst": round(max(worst), 6),
        "mean": round(float(np.mean(worst)), 6),
        "repeats": all(np.array_equal(a, b) for a, b in zip(got, again, strict=True)),
        "greedy_is_argmax": all(np.array_equal(ids, x.argmax(axis=1)) for ids, x in best),
    }


def _poison(runner: OnnxRuntimeCudaRunner) -> None:
    """Fill the pools with NaN, which no product may meet."""
    if (dtype := runner.kv_cache_spec.dtype) != "bfloat16":  # NumPy has no such numbers
        for pool in runner._model._pools.values():
            pool.update_inplace(np.full(pool.shape(), np.nan, dtype))


def _logits(forward: Forward) -> list[NDArray[np.float32]]:
    vocab_size = 4096
    return [np.array(forward(rows)[1]) for rows in _steps(vocab_size)]


def _steps(vocab_size: int) -> Iterator[tuple[StepRow, ...]]:
    """Yield steps of ragged requests: prefill in chunks, beside decodes, then decodes alone."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, vocab_size, n + _DECODES).astype(np.int32) for n in _PROMPTS]
    counts = [-(-len(ids) // BLOCK_SIZE) for ids in tokens]
    blocks = rng.permutation(NUM_BLOCKS)[: sum(counts)].astype(np.int32)
    tables = np.split(blocks, np.cumsum(counts)[:-1])
    done = [0] * len(tokens)
    while any(done[i] < len(ids) for i, ids in enumerate(tokens)):
        step = []
        for i, ids in enumerate(tokens):
            count = min(_CHUNKS[i], _PROMPTS[i] - done[i]) if done[i] < _PROMPTS[i] else 1
            new = ids[done[i] : done[i] + count]
            if len(new):
                step.append(StepRow(RequestKey(str(i)), new, done[i], tables[i], GREEDY))
                done[i] += len(new)
        yield tuple(step)
