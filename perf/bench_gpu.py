"""DeepSeek shapes on one GPU: steps as the engine sees them, against the memory's limit and vLLM.

Makes models with random weights on the device, checks them against plain PyTorch, and times steps
of the cuda runner: from StepRows to token ids on the host. Nothing is read from disk.

    python perf/bench_gpu.py                         # everything; perf/results/gpu_<card>.json
    python perf/bench_gpu.py --parts check bf16      # some of it
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from record import save_result

from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.evaluate.perplexity import score_windows
from deepseek_triton.evaluate.stepping import SteppingScorer
from deepseek_triton.kernels.launch import launches_in_turn
from deepseek_triton.runner import cuda_graphs
from deepseek_triton.runner.cuda_model import CudaModel

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

from measure import (
    device_time,
    kernel_table,
    make_model,
    make_runner,
    print_kernels,
    rows,
    time_decode,
    time_steps,
)
from random_model import V2_LITE, V3_LAYER, make_spec
from steady import steady_state

# Milliseconds: bytes that a step must read over 4.3 TB/s, and vLLM 0.25.1 measured on an H200.
LIMITS = {
    "bf16": {1: 1.15, 8: 4.22, 64: 7.67},
    "int4": {1: 0.375, 8: 1.21, 64: 2.40},
    "prefill": {1024: 8.0, 8192: 60.0},
}
VLLM = {
    "bf16": {1: 3.32, 8: 6.82, 64: 10.24},
    "int4": {1: 4.05, 8: 4.56, 64: None},
    "prefill": {1024: 73.0, 8192: 106.0},
}
AIMS = {
    "bf16": {1: 1.64, 8: 5.3, 64: 8.7},
    "int4": {1: 0.85, 8: 2.4, 64: 5.8},
    "prefill": {1024: 15.0, 8192: 90.0},
}
CONTEXT = 1024
BATCHES = (1, 8, 64)
# Only the graphs that are timed: capturing all takes longer than timing these.
only_timed = patch.multiple(cuda_graphs, BATCHES=BATCHES[:-1], PROMPT_BUCKETS=((CONTEXT, 16),))
PROFILE = True


def check() -> dict[str, Any]:
    """Relative errors of logits against float32 PyTorch: of the kernels, and of PyTorch in bf16."""
    from checks import logit_errors

    return logit_errors()


def decode(kind: str, group_size: int) -> dict[str, Any]:
    """Decode and prefill of the 27-layer model in one weight format."""
    spec = make_spec(V2_LITE)
    model = make_model(spec, "bf16", group_size)
    started = time.perf_counter()
    runner = make_runner(model, spec)
    measured: dict[str, Any] = {
        "memory_gb": round(torch.cuda.memory_allocated() / 1e9, 2),
        "capture_s": round(time.perf_counter() - started, 1),
    }
    print(f"  {measured}", flush=True)
    for batch in BATCHES:
        step = rows(batch, 1, CONTEXT, spec.vocab_size)
        tokens = runner.run(step).token_ids  # of unlike rows, which choose different experts
        result = time_decode(runner, step, 100)
        result["different_tokens"] = len(set(tokens.tolist()))
        result["device_ms"] = device_time(lambda s=step: runner._decoder.run(s), 50)
        report(kind, batch, result, f"B={batch}", batch)
        measured[f"decode_{batch}"] = result
    for tokens in (1024, 8192):
        step = rows(1, tokens, 0, spec.vocab_size)
        result = time_steps(lambda s=step: runner.run(s), 10, 3)
        report("prefill", tokens, result, f"prefill {tokens}", tokens)
        measured[f"prefill_{tokens}"] = result
    runner.close()
    collect()
    if PROFILE:
        measured["kernels"] = profile(model, spec)
    return measured


def profile(model: CudaModel, spec: ModelSpec) -> dict[str, Any]:
    """Kernels of each step, launched one after the other."""
    tables = {}
    with launches_in_turn():
        runner = make_runner(model, spec, use_graphs=False)
        for batch, new in (*((b, 1) for b in BATCHES), (1, 1024), (1, 8192)):
            step = rows(batch, new, CONTEXT if new == 1 else 0, spec.vocab_size)
            name = f"decode_{batch}" if new == 1 else f"prefill_{new}"
            tables[name] = kernel_table(lambda s=step: runner.run(s))
            print(f"   {name}")
            print_kernels(tables[name][:16])
        runner.close()
    return tables


def report(kind: str, key: int, result: dict[str, Any], label: str, tokens: int) -> None:
    """Print one line, and add limit and comparison to `result`."""
    time_ms = result["median_ms"]
    limit, theirs, aim = (table[kind][key] for table in (LIMITS, VLLM, AIMS))
    result |= {"limit_ms": limit, "vllm_ms": theirs, "aim_ms": aim}
    result |= {"share_of_limit": round(limit / time_ms, 3), "tokens_per_s": tokens / time_ms * 1e3}
    print(
        f"  {label:14s} {time_ms:8.3f} ms (p99 {result['p99_ms']:.3f})  limit {limit} "
        f"({limit / time_ms:.0%})  aim {aim}  vLLM {theirs}",
        flush=True,
    )


def bf16() -> dict[str, Any]:
    """DeepSeek-V2-Lite in bf16."""
    return decode("bf16", 0)


def int4() -> dict[str, Any]:
    """DeepSeek-V2-Lite in INT4, groups of 128."""
    return decode("int4", 128)


@only_timed
def graphs() -> dict[str, Any]:
    """The same decode steps call by call and in graphs."""
    spec = make_spec(V2_LITE)
    model = make_model(spec, "bf16")
    measured: dict[str, Any] = {}
    for name, use_graphs in (("call by call", False), ("graph", True)):
        runner = make_runner(model, spec, use_graphs=use_graphs)
        for batch in BATCHES:
            step = rows(batch, 1, CONTEXT, spec.vocab_size)
            result = time_steps(lambda r=runner, s=step: r.run(s), 60)
            result["tokens_per_s"] = round(batch / result["median_ms"] * 1e3)
            measured[f"{name}, B={batch}"] = result
            print(f"  {name}, B={batch}: {result}", flush=True)
        runner.close()
        collect()
    return measured


@only_timed
def fp16() -> dict[str, Any]:
    """One precision more: FP16, for comparison with INT4 in speed and memory."""
    spec = make_spec(V2_LITE)
    runner = make_runner(make_model(spec, "fp16"), spec, "fp16")
    measured: dict[str, Any] = {"memory_gb": round(torch.cuda.memory_allocated() / 1e9, 2)}
    for batch in BATCHES:
        step = rows(batch, 1, CONTEXT, spec.vocab_size)
        measured[f"decode_{batch}"] = time_decode(runner, step, 60)
        print(f"  fp16 B={batch}: {measured[f'decode_{batch}']}", flush=True)
    runner.close()
    return measured


@only_timed
def v3() -> dict[str, Any]:
    """One layer of DeepSeek-V3's shape, with embedding and head."""
    spec = make_spec(V3_LAYER)
    measured: dict[str, Any] = {}
    for name, group_size in (("bf16", 0), ("int4", 128)):
        runner = make_runner(make_model(spec, "bf16", group_size), spec)
        for batch in BATCHES:
            step = rows(batch, 1, CONTEXT, spec.vocab_size)
            result = time_decode(runner, step, 60)
            measured[f"{name}_{batch}"] = result
            print(f"  V3 layer {name} B={batch}: {result}", flush=True)
        step = rows(1, 1024, 0, spec.vocab_size)
        measured[f"{name}_prefill_1024"] = time_steps(lambda r=runner, s=step: r.run(s), 10, 3)
        print(f"  V3 layer {name} prefill: {measured[f'{name}_prefill_1024']}", flush=True)
        runner.close()
        collect()
    return measured


def evaluate() -> dict[str, Any]:
    """Log probs of given text, DeepSeek-V2-Lite in bf16: whole chunks against token by token."""
    spec = make_spec(V2_LITE)
    runner = make_runner(make_model(spec, "bf16"), spec, max_batch_size=1, num_blocks=8)
    text = np.random.default_rng(7).integers(0, spec.vocab_size, (3, 513)).astype(np.int32)
    measured: dict[str, Any] = {}
    scored = {}
    for name, scorer, windows in (
        ("warm-up", runner, text[:1]),
        ("whole chunks", runner, text),
        ("token by token", SteppingScorer(runner), text[:1, :129]),
    ):
        started = time.perf_counter()
        scored[name] = score_windows(scorer, windows)
        seconds = time.perf_counter() - started
        measured[name] = {"tokens_per_s": round(scored[name].log_probs.size / seconds)}
    both = (scored[name].log_probs[0, :128] for name in ("whole chunks", "token by token"))
    measured["largest_difference"] = float(np.abs(np.subtract(*both)).max())
    print(f"  {measured}", flush=True)
    runner.close()
    return measured


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "check": check,
    "bf16": bf16,
    "int4": int4,
    "graphs": graphs,
    "fp16": fp16,
    "v3": v3,
    "evaluate": evaluate,
    "steady": steady_state,
}


def collect() -> None:
    """Give the device's memory back before the next model."""
    gc.collect()
    torch.cuda.empty_cache()


def main() -> int:
    """Run the parts, print their tables, keep the results; 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--name", default="gpu_h200", help="of the file in perf/results")
    parser.add_argument("--no-profile", action="store_true", help="without the kernel tables")
    arguments = parser.parse_args()
    globals()["PROFILE"] = not arguments.no_profile
    measured: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
    }
    failed = False
    for part in arguments.parts:
        print(f"{part}: {PARTS[part].__doc__.splitlines()[0]}", flush=True)
        started = time.perf_counter()
        try:
            measured[part] = PARTS[part]()
        except Exception:  # a device's time is dear: the other parts still run
            failed = True
            measured[part] = {"failed": traceback.format_exc()}
            traceback.print_exc()
        measured[part]["part_s"] = round(time.perf_counter() - started, 1)
        print(f"  {part} took {measured[part]['part_s']} s", flush=True)
        collect()
        print(save_result(arguments.name, measured))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
