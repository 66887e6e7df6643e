"""Check and time the linear, expert, routing and sampling kernels on one GPU, at real shapes.

    python perf/gpu/linear_check.py --out results.json [--sweep] [--only PART]

Every check draws fresh data, poisons the output and compares with a wider type. Times are those of
a call inside a CUDA graph over several copies of the weights, larger together than the L2 cache:
with kernels that start early (launch.py), and in turn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import linear_check_cases as cases
import torch
import triton

from deepseek_triton.kernels.launch import launches_in_turn

BYTES_PER_US = 4.3e6  # a copy's rate, read and written
FLOPS_PER_US = 780e6  # a large bf16 product's rate


def run_cases(description: str, all_cases: Callable[..., Iterable[cases.Case]]) -> None:
    """Run those of `all_cases(sweep=…)` that the command line names."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--sweep", action="store_true", help="also other tile sizes")
    parser.add_argument("--no-time", action="store_true", help="check only")
    args = parser.parse_args()
    results = []
    for case in all_cases(sweep=args.sweep):
        if args.only in case.name:
            results.append(measure(case, timed=not args.no_time))
            show(results[-1])
    bad = [r["name"] for r in results if not r["ok"]]
    args.out.write_text(
        json.dumps(
            {
                "card": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "triton": triton.__version__,
                "failed": bad,
                "cases": results,
            },
            indent=1,
        )
    )
    print(f"{len(results)} cases, failed: {bad or 'none'}")


def measure(case: cases.Case, *, timed: bool) -> dict[str, Any]:
    """Return the case's name, error, time and its share of the floor."""
    started = time.perf_counter()
    result: dict[str, Any] = {"name": case.name, "ok": False}
    try:
        run = case.prepare()
        error = case.check(run)
        result |= {"error": error, "ok": bool(error <= case.tolerance)}
        if timed and case.timed:
            overlapping = time_calls(run, case.calls)
            with launches_in_turn():
                in_turn = time_calls(run, case.calls)
            floor = max(case.bytes / BYTES_PER_US, case.flops / FLOPS_PER_US)
            result |= {
                "us": round(overlapping, 2),
                "us_in_turn": round(in_turn, 2),
                "floor_us": round(floor, 2),
                "tflops": round(case.flops / min(overlapping, in_turn) / 1e6, 1),
            }
        del run
    except Exception as problem:  # a tile that does not fit must not end the others
        result["problem"] = f"{type(problem).__name__}: {str(problem)[:300]}"
    torch.cuda.empty_cache()
    result["seconds"] = round(time.perf_counter() - started, 1)
    return result


def time_calls(run: Callable[[int], Any], calls: int) -> float:
    """Return microseconds a call: median of replays of a graph of `calls` calls."""
    for i in range(calls):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            run(i)
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return sorted(times)[len(times) // 2]


def show(result: dict[str, Any]) -> None:
    """Print a line."""
    numbers = (
        f"{result.get('us', '-'):>9} us  in turn {result.get('us_in_turn', '-'):>9}"
        f"  floor {result.get('floor_us', '-'):>8}  {result.get('tflops', '-'):>6} TFLOP/s"
    )
    problem = result.get("problem", f"error {result.get('error', float('nan')):.1e}")
    mark = "  " if result["ok"] else "!!"
    print(f"{mark} {result['name']:<52} {numbers}  {problem}", flush=True)


if __name__ == "__main__":
    run_cases(__doc__.splitlines()[0], cases.all_cases)
