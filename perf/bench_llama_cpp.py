"""Decode speed of INT4 on ONNX Runtime against llama.cpp's Q4_0, on the same weights.

Both are made from the float32 checkpoint of perf/reference_model.py: ours by bench_engine.py --int4
(rounded to nearest, groups of 128 with zero points, the output layer in 8 bits), the other by
llama.cpp's quantiser as it does by default (groups of 32 without zero points; the result lists what
types tensors have). First both run the float32 weights and must find the same log probs.
Then each round times one process of either side, as bench_engine.py does: 48 greedy steps of B = 1
and B = 8 requests after a prompt of 128 tokens and 8 steps of warm-up, 2 threads each. A step of
llama.cpp is llama_decode and an argmax; ours is all of StepEngine.step. llama.cpp keeps its default
KV cache of float16; ours is float32.

This project does not install llama.cpp, which compiles for ten minutes or more. It needs an
environment of its own, a C++ compiler and CMake:

    python3 -m venv .cache/llama
    .cache/llama/bin/pip install llama-cpp-python==0.3.36 gguf==0.19.0 safetensors
    python perf/bench_llama_cpp.py --llama-python .cache/llama/bin/python
                                           # writes perf/results/llama_cpp.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench_engine import (
    CACHE,
    THREADS,
    TIMED_TOKENS,
    WARMUP_TOKENS,
    compare,
    describe,
    int4_engine,
    prompts,
    reference_engine,
    run_worker,
)
from record import save_result
from reference_model import REFERENCE_CONFIG

from deepseek_triton.evaluate.perplexity import score_windows
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner

SIDE = Path(__file__).with_name("llama_cpp_side.py")
SCORED_PROMPTS = 2
TOLERANCE = 1e-2  # of log probs, float32 against float32


def ask_llama_cpp(python: Path, *arguments: object, job: dict[str, Any] | None = None) -> Any:
    """Run llama_cpp_side.py and return what it printed."""
    command = [str(python), str(SIDE), *map(str, arguments)]
    done = subprocess.run(
        command, check=False, input=json.dumps(job), stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(
            f"{python} could not do the part of llama.cpp; it needs llama-cpp-python, gguf and "
            "safetensors, see the beginning of perf/bench_llama_cpp.py"
        )
    return json.loads(done.stdout.splitlines()[-1])


def agreement(python: Path, files: dict[str, Path]) -> dict[str, Any]:
    """Compare the log probs of all four; exit if those of float32 are not the same.

    `files` are by name: "fp32" and "int4" our engines, "f32" and "q4_0" those of llama.cpp.
    """
    windows = prompts(SCORED_PROMPTS, REFERENCE_CONFIG["vocab_size"])
    found, best = {}, {}
    for name in ("fp32", "int4"):
        with closing(OnnxRuntimeRunner.load(files[name], num_blocks=64)) as runner:
            scores = score_windows(runner, np.array(windows, np.int32), name)
        found[name], best[name] = scores.log_probs.ravel(), scores.best_ids.ravel()
    for name in ("f32", "q4_0"):
        job = {"prompts": windows, "threads": THREADS}
        answer = ask_llama_cpp(python, "score", files[name], job=job)
        found[name], best[name] = np.array(answer["log_probs"]), np.array(answer["best_ids"])
    difference = float(np.abs(found["f32"] - found["fp32"]).max())
    if difference > TOLERANCE:
        sys.exit(f"not the same model: log probs in float32 differ by up to {difference:.3g}")
    result: dict[str, Any] = {
        "tokens": len(found["fp32"]),
        "fp32_max_difference": difference,
        "fp32_same_likeliest": float((best["f32"] == best["fp32"]).mean()),
    }
    for name in ("int4", "q4_0"):
        error = np.abs(found[name] - found["fp32"]).mean()
        result[f"{name}_mean_error_of_log_probs"] = round(float(error), 4)
        result[f"{name}_same_likeliest"] = float((best[name] == best["fp32"]).mean())
    return result


def time_llama_cpp(python: Path, gguf: Path, batch_size: int) -> dict[str, float]:
    """Time greedy steps in a process of its own."""
    job = {
        "prompts": prompts(batch_size, REFERENCE_CONFIG["vocab_size"]),
        "warmup": WARMUP_TOKENS,
        "timed": TIMED_TOKENS,
        "threads": THREADS,
    }
    return describe(ask_llama_cpp(python, "decode", gguf, job=job)["steps"])


def main() -> None:
    """Check, run the rounds, print a table and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-python", type=Path, required=True, help="with llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=3, help="0: the check alone, keeps nothing")
    arguments = parser.parse_args()
    python: Path = arguments.llama_python
    checkpoint, engine_dir = reference_engine()
    files = {
        "fp32": engine_dir,
        "int4": int4_engine(checkpoint),
        "f32": CACHE / "reference-f32.gguf",
        "q4_0": CACHE / "reference-q4_0.gguf",
    }
    stored = ask_llama_cpp(python, "convert", checkpoint, files["f32"], files["q4_0"])
    measured: dict[str, Any] = {
        "llama_cpp_python": ask_llama_cpp(python, "version"),
        "q4_0_tensors": stored,
        "agreement": agreement(python, files),
    }
    print(json.dumps(measured, indent=1))
    if arguments.rounds:
        sides = {
            "int4": partial(run_worker, "engine", files["int4"]),
            "q4_0": partial(time_llama_cpp, python, files["q4_0"]),
        }
        print(save_result("llama_cpp", measured | compare(sides, arguments.rounds)))


if __name__ == "__main__":
    main()
