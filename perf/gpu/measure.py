"""Runners over random models, and how long their steps take as the engine sees them."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from random_model import make_program, quantized, random_weights

from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.kv_cache.spec import KVCacheSpec
from deepseek_triton.request import RequestKey, SamplingParams
from deepseek_triton.runner.base import FollowingRow, RowSampling, StepRow
from deepseek_triton.runner.cuda import CudaRunner
from deepseek_triton.runner.cuda_model import CudaModel
from deepseek_triton.runner.cuda_operators import load_model

BLOCK_SIZE = 64
NO_TOKENS = np.zeros(0, np.int32)
GREEDY = RowSampling(SamplingParams(), 0.0, None, NO_TOKENS, NO_TOKENS)


def make_model(spec: ModelSpec, precision: str = "bf16", group_size: int = 0) -> CudaModel:
    """Return a model with random weights on the GPU; INT4 layers where `group_size` is not 0."""
    program = make_program(spec, precision, BLOCK_SIZE)
    if group_size:
        program = quantized(program, group_size)
    device = torch.device("cuda", 0)
    return load_model(program, device, precision, lambda p, d, _: random_weights(p, d))


def make_runner(
    model: CudaModel,
    spec: ModelSpec,
    precision: str = "bf16",
    *,
    num_blocks: int = 1536,
    max_batch_size: int = 64,
    max_context_len: int = 2048,
    use_graphs: bool = True,
) -> CudaRunner:
    """Return a runner whose cache holds random numbers."""
    cache = KVCacheSpec(
        num_layers=spec.num_layers,
        width=spec.attention.pool_width,
        pools=spec.attention.pools,
        block_size=BLOCK_SIZE,
        dtype={"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[precision],
        itemsize=4 if precision == "fp32" else 2,
    )
    runner = CudaRunner(
        model,
        cache,
        vocab_size=spec.vocab_size,
        num_blocks=num_blocks,
        max_batch_size=max_batch_size,
        max_context_len=max_context_len,
        use_graphs=use_graphs,
    )
    for pool in runner._pools.values():
        pool.normal_()
    return runner


def rows(
    batch: int,
    new: int,
    context: int,
    vocab: int,
    seed: int = 0,
    blocks: int = 0,
    block_size: int = BLOCK_SIZE,
) -> tuple[StepRow, ...]:
    """Return rows of `new` random tokens after `context` cached ones, in blocks of their own.

    Which blocks depends on `batch`, `seed` and their number in a row, `blocks` if it is given.
    """
    rng = np.random.default_rng(seed)
    blocks = blocks or -(-(new + context) // block_size)
    tables = rng.permutation(batch * blocks).astype(np.int32).reshape(batch, blocks)
    ids = rng.integers(0, vocab, (batch, new)).astype(np.int32)
    return tuple(
        StepRow(RequestKey(str(i)), ids[i], context, tables[i], GREEDY) for i in range(batch)
    )


def time_steps(run: Callable[[], Any], count: int, warm_up: int = 5) -> dict[str, float]:
    """Milliseconds of `run` as the host sees it: median, 99th percentile, fastest."""
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(count):
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e3)
    times.sort()
    return {
        "median_ms": round(statistics.median(times), 4),
        "p99_ms": round(times[min(len(times) - 1, int(len(times) * 0.99))], 4),
        "fastest_ms": round(times[0], 4),
    }


def time_decode(runner: CudaRunner, step: tuple[StepRow, ...], count: int) -> dict[str, float]:
    """As time_steps, of decode steps as the engine runs them: each is launched before the host has
    the tokens of the one before. The context stays as long as it is.

    `waiting_ms`: the median of steps that are launched when the host has them.
    """
    following = tuple(FollowingRow(i, row) for i, row in enumerate(step))
    waiting = time_steps(lambda: runner.run(step), count)

    def run() -> None:
        nonlocal step
        drawn = runner.run(step, following).token_ids
        step = tuple(replace(row, token_ids=drawn[i : i + 1]) for i, row in enumerate(step))

    return {**time_steps(run, count), "waiting_ms": waiting["median_ms"]}


def device_time(run: Callable[[], Any], count: int) -> float:
    """Milliseconds that the device needs for `run`, launched again without waiting for it."""
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return round(begin.elapsed_time(end) / count, 4)


def kernel_table(run: Callable[[], Any], top: int = 25) -> list[dict[str, Any]]:
    """Run once under the profiler; return kernels by total time."""
    run()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    total: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name].append(event.device_time_total)
    table = [
        {
            "kernel": name[:80],
            "calls": len(times),
            "us_each": round(statistics.mean(times), 2),
            "us_total": round(sum(times), 1),
        }
        for name, times in total.items()
    ]
    return sorted(table, key=lambda entry: -entry["us_total"])[:top]


def print_kernels(table: list[dict[str, Any]]) -> None:
    """Print what `kernel_table` returned."""
    for entry in table:
        print(
            f"    {entry['us_total']:9.1f} us {entry['calls']:5d} x {entry['us_each']:8.2f}  "
            f"{entry['kernel']}"
        )
