"""ONNX Runtime's CUDA provider on one GPU: numbers checked, steps timed beside our own kernels.

    python perf/bench_onnxruntime_gpu.py                    # perf/results/onnxruntime_gpu.json
    python perf/bench_onnxruntime_gpu.py --parts fp16 --layers 7

Needs onnxruntime-gpu (`make setup-onnxruntime-gpu`) and, for weights and the comparison, PyTorch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from record import save_result

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

from measure import kernel_table, make_model, make_runner, print_kernels, rows, time_steps
from onnxruntime_check import check_family, check_int4
from random_engine import ONNXRUNTIME_BLOCK_SIZE, onnxruntime_engine
from random_model import V2_LITE, make_spec

from deepseek_triton.checkpoint.presets import PRESETS
from deepseek_triton.runner.onnxruntime_cuda import OnnxRuntimeCudaRunner

CONTEXT = 1024
CASES = {
    **{f"decode_{batch}": (batch, 1, CONTEXT) for batch in (1, 8, 64)},
    "prefill_1024": (1, 1024, 0),
    "prefill_1024_after_1024": (1, 1024, CONTEXT),
}
Results = dict[str, Any]


def attempt(name: str, work: Callable[[], Any], results: Results) -> None:
    """Keep what `work` returns, or its error, under `name`; print either."""
    started = time.perf_counter()
    try:
        results[name] = work()
    except Exception as error:  # one case must not end the others
        traceback.print_exc()
        results[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
    print(f"{name} ({time.perf_counter() - started:.1f} s): {results[name]}", flush=True)


def check(folder: Path) -> Results:
    """Errors of logits against the CPU provider in fp32, relative to the largest logit."""
    errors: Results = {}
    for family in PRESETS:
        attempt(family, lambda family=family: check_family(folder / family, family), errors)
    for family, group in (("v2-lite", 32), ("v2-lite", 64), ("v3", 128)):
        name = f"{family} int4 {group}"
        attempt(name, lambda f=family, g=group, n=name: check_int4(folder / n, f, g), errors)
    return errors


def speed(folder: Path, precision: str, num_layers: int, ours: bool) -> Results:
    """Milliseconds of steps of DeepSeek-V2-Lite's shape with `num_layers` layers."""
    spec = make_spec(V2_LITE, num_hidden_layers=num_layers)
    results: Results = {"layers": num_layers}
    started = time.perf_counter()
    engine = onnxruntime_engine(folder / precision, spec, precision)
    results["write_s"] = round(time.perf_counter() - started, 2)
    started = time.perf_counter()
    runner = OnnxRuntimeCudaRunner(engine, num_blocks=64 * 68)
    results["load_s"] = round(time.perf_counter() - started, 2)
    with closing(runner):
        for name, (batch, new, context) in CASES.items():
            step = rows(batch, new, context, spec.vocab_size, block_size=ONNXRUNTIME_BLOCK_SIZE)
            run = lambda step=step: runner.run(step)  # noqa: E731
            attempt(name, lambda run=run: time_steps(run, 30), results)
            if name in ("decode_1", "decode_64", "prefill_1024"):
                attempt(f"{name}_kernels_us", lambda run=run: kernels(run), results)
    if ours:
        results["ours"] = {}
        del runner
        torch.cuda.empty_cache()
        attempt("ours", lambda: our_speed(spec, precision), results)
    return results


def kernels(run: Callable[[], Any]) -> float:
    """Print which kernels a step runs; return their microseconds in all."""
    table = kernel_table(run, top=1000)
    print_kernels(table[:20])
    return round(sum(entry["us_total"] for entry in table), 1)


def our_speed(spec: Any, precision: str) -> Results:
    """The same steps on the cuda runner."""
    results: Results = {}
    runner = make_runner(make_model(spec, precision), spec, precision)
    with closing(runner):
        for name, (batch, new, context) in CASES.items():
            step = rows(batch, new, context, spec.vocab_size)
            attempt(name, lambda step=step: time_steps(lambda: runner.run(step), 30), results)
    return results


def main() -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["check", "fp16", "bf16"])
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--ours", action="store_true", help="time the cuda runner as well")
    args = parser.parse_args()
    results: Results = {"gpu": torch.cuda.get_device_name()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in args.parts:
            if part == "check":
                attempt(part, lambda: check(folder), results)
            else:
                attempt(
                    part, lambda part=part: speed(folder, part, args.layers, args.ours), results
                )
    save_result("onnxruntime_gpu", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
