"""Prompts by CUDA graph against the same call by call: logits and milliseconds of a step.

python perf/gpu/prompt_buckets_check.py ENGINE     # an engine built with TARGET=cuda
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from deepseek_triton.build.engine_dir import load_engine_dir
from deepseek_triton.request import RequestKey, SamplingParams
from deepseek_triton.runner.base import RowSampling, StepRow
from deepseek_triton.runner.cuda import CudaRunner

CASES = (
    (130,) * 7,
    (130,) * 8,
    (164,) * 7,
    (3,) * 20,
    (164,) * 12,
    (500, 30, 900, 1, 7, 411),
    (164,) * 18,
    (2900, 7, 100),
    (60,) * 64,
    (4096,),
)
TIMES = 7
NOTHING = np.zeros(0, np.int32)
GREEDY = RowSampling(SamplingParams(), 0.0, None, NOTHING, NOTHING)


def step_of(lengths: tuple[int, ...], block_size: int, rng: np.random.Generator) -> Any:
    """Return rows of whole prompts, each with blocks of its own."""
    rows, block = [], 0
    for index, length in enumerate(lengths):
        needed = -(-length // block_size)
        table = np.arange(block, block + needed, dtype=np.int32)
        ids = rng.integers(3, 4000, length).astype(np.int32)
        rows.append(StepRow(RequestKey(f"{index}"), ids, 0, table, GREEDY))
        block += needed
    return tuple(rows)


def main() -> None:
    """Run all cases and print one JSON line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path)
    engine_dir = load_engine_dir(parser.parse_args().engine, verify_contents=False)
    runner = CudaRunner.open(
        engine_dir, num_blocks=256, max_batch_size=1, max_context_len=4096, max_tokens_per_step=4096
    )
    buckets, rng = runner._prompts, np.random.default_rng(0)
    assert buckets is not None
    for lengths in CASES:
        rows = step_of(lengths, runner.kv_cache_spec.block_size, rng)
        packed = [row for row in rows if len(row.token_ids) > 1]
        result: dict[str, Any] = {"rows": len(rows), "tokens": sum(lengths)}
        result["in_a_bucket"] = buckets.hold(packed)
        logits = {}
        for side, prompts in (("graph", buckets), ("calls", None)):
            runner._prompts = prompts
            for pool in runner._pools.values():
                pool.normal_()  # what an earlier step left must not matter
            logits[side] = runner.forward(rows)
            taken = []
            for _ in range(TIMES):
                started = time.perf_counter()
                runner.run(rows)
                taken.append(time.perf_counter() - started)
            result[f"{side}_ms"] = round(statistics.median(taken) * 1e3, 2)
        norm = np.linalg.norm(logits["calls"], axis=1)
        error = np.linalg.norm(logits["graph"] - logits["calls"], axis=1) / norm
        result["error"] = round(float(error.max()), 5)
        result["finite"] = bool(np.isfinite(logits["graph"]).all())
        print(json.dumps(result), flush=True)
    runner.close()


if __name__ == "__main__":
    main()
