"""Decode speed of the engine against transformers, and what the engine adds to ONNX Runtime.

The same fp32 weights (perf/reference_model.py), the same machine, the same threads, in turns:
each round runs one process of either side. Steps of B = 1 and B = 8 requests, each with a prompt of
128 tokens, are timed over 48 greedy tokens after a warm-up. Medians are what a user sees; the
fastest steps are what is left when nothing else wants the cores, which hurts torch most.

    python perf/bench_engine.py            # writes perf/results/engine_decode.json
    python perf/bench_engine.py --int4     # writes perf/results/int4_decode.json

With --int4 the other side is the same engine with INT4 weights: rounded to nearest, groups of 128
with zero points, accuracy level 4.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from record import save_result
from reference_model import REFERENCE_CONFIG, write_reference_checkpoint

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "perf"
BATCH_SIZES = (1, 8)
PROMPT_TOKENS, WARMUP_TOKENS, TIMED_TOKENS = 128, 8, 48
THREADS = 2


def prompts(batch_size: int, vocab_size: int) -> list[list[int]]:
    """The same random token ids for both sides."""
    rng = np.random.default_rng(7)
    return rng.integers(3, vocab_size, (batch_size, PROMPT_TOKENS)).tolist()


class TimedSession:
    """Stands in front of an InferenceSession and adds up the time inside ONNX Runtime."""

    def __init__(self, session: Any) -> None:
        self.session, self.seconds = session, 0.0

    def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
        """Run and count."""
        started = time.perf_counter()
        self.session.run_with_iobinding(binding, options)
        self.seconds += time.perf_counter() - started


def describe(steps: list[float]) -> dict[str, float]:
    """Median and fastest of step times in seconds."""
    return {"median_s": statistics.median(steps), "fastest_s": min(steps)}


def measure_engine(engine_dir: Path, batch_size: int) -> dict[str, float]:
    """Time steps of StepEngine, and the share of them that is not spent in ONNX Runtime."""
    from deepseek_triton.config import SchedulerConfig
    from deepseek_triton.engine.engine import StepEngine
    from deepseek_triton.request import Request, RequestKey
    from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner

    runner = OnnxRuntimeRunner.load(engine_dir, num_blocks=256, num_threads=THREADS)
    model = runner._models[0]
    session = TimedSession(model._session)
    model._session = session  # type: ignore[assignment]
    engine = StepEngine(runner, SchedulerConfig(max_batch_size=16))
    tokens = [0] * batch_size
    for index, prompt in enumerate(prompts(batch_size, runner.vocab_size)):

        def count(output: Any, index: int = index) -> None:
            tokens[index] += len(output.token_ids)

        max_tokens = WARMUP_TOKENS + TIMED_TOKENS + batch_size * 4
        engine.submit(Request(RequestKey(str(index)), tuple(prompt), max_tokens), count)
    while min(tokens) < WARMUP_TOKENS:
        engine.step()
    session.seconds, steps = 0.0, []
    for _ in range(TIMED_TOKENS):
        started = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - started)
    return {**describe(steps), "overhead_share": 1 - session.seconds / sum(steps)}


def measure_transformers(checkpoint: Path, batch_size: int) -> dict[str, float]:
    """Time greedy decode steps of transformers' own class, eager attention, cache in use."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        ids = torch.tensor(prompts(batch_size, model.config.vocab_size))
        cache, steps = None, []
        for step in range(WARMUP_TOKENS + TIMED_TOKENS):
            started = time.perf_counter()
            output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
            if step >= WARMUP_TOKENS:
                steps.append(time.perf_counter() - started)
    return describe(steps)


def run_worker(side: str, folder: Path, batch_size: int) -> dict[str, float]:
    """Measure one side in a process of its own, so that neither warms the other's threads."""
    command = [sys.executable, __file__, "--worker", side, str(folder), str(batch_size)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def summarize(
    rounds: list[dict[str, dict[str, float]]], batch_size: int, ours: str, theirs: str
) -> dict[str, float]:
    """Medians over the rounds, and the ratios of medians and of the fastest steps."""

    def over_rounds(side: str, key: str) -> float:
        return statistics.median(r[side][key] for r in rounds)

    fastest = {side: min(r[side]["fastest_s"] for r in rounds) for side in (ours, theirs)}
    medians = {side: over_rounds(side, "median_s") for side in (ours, theirs)}
    return {
        f"{ours}_tokens_per_s": round(batch_size / medians[ours], 1),
        f"{theirs}_tokens_per_s": round(batch_size / medians[theirs], 1),
        "speedup_of_medians": round(medians[theirs] / medians[ours], 2),
        "speedup_of_fastest_steps": round(fastest[theirs] / fastest[ours], 2),
        f"{ours}_overhead_share": round(over_rounds(ours, "overhead_share"), 4),
    }


def main() -> None:
    """Run the rounds, print a table and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--int4", action="store_true", help="compare INT4 with fp32 instead")
    parser.add_argument("--worker", nargs=3, metavar=("SIDE", "FOLDER", "BATCH"))
    arguments = parser.parse_args()
    if arguments.worker:
        side, folder, batch_size = arguments.worker
        measure = {"engine": measure_engine, "transformers": measure_transformers}[side]
        print(json.dumps(measure(Path(folder), int(batch_size))))
        return
    checkpoint, engine_dir = reference_engine()
    sides: dict[str, tuple[str, Path]]  # ours first: what measures each, and on which folder
    if arguments.int4:
        sides = {"int4": ("engine", int4_engine(checkpoint)), "fp32": ("engine", engine_dir)}
    else:
        sides = {
            "engine": ("engine", engine_dir),
            "transformers": ("transformers", checkpoint),
        }
    measured = compare(
        {side: partial(run_worker, *place) for side, place in sides.items()}, arguments.rounds
    )
    print(save_result("int4_decode" if arguments.int4 else "engine_decode", measured))


def compare(
    sides: Mapping[str, Callable[[int], dict[str, float]]], num_rounds: int
) -> dict[str, Any]:
    """Measure two sides in turns, ours first, by batch size; print and return the summaries."""
    ours, theirs = sides
    measured: dict[str, Any] = {}
    for batch_size in BATCH_SIZES:
        rounds = [
            {side: measure(batch_size) for side, measure in sides.items()}
            for _ in range(num_rounds)
        ]
        summary = summarize(rounds, batch_size, ours, theirs)
        measured[f"batch_{batch_size}"] = {**summary, "rounds": rounds}
        print(f"B={batch_size}: {summary}")
    return measured


def reference_engine(
    name: str = "reference", config: Mapping[str, Any] = REFERENCE_CONFIG
) -> tuple[Path, Path]:
    """Write a checkpoint and its engine under .cache/perf, once."""
    from deepseek_triton.server.engine_cache import ensure_engine

    CACHE.mkdir(parents=True, exist_ok=True)
    checkpoint = write_reference_checkpoint(CACHE / name, config=config)
    engine_dir = CACHE / f"{name}-engine"
    ensure_engine(checkpoint, engine_dir)
    return checkpoint, engine_dir


def int4_engine(checkpoint: Path) -> Path:
    """Quantise the reference checkpoint and build its engine under .cache/perf, once."""
    from deepseek_triton.calibrate.quantize import QuantizeOptions, quantize_checkpoint
    from deepseek_triton.server.engine_cache import ensure_engine

    quantized, engine_dir = CACHE / "reference-int4", CACHE / "reference-int4-engine"
    if not quantized.is_dir():
        quantize_checkpoint(checkpoint, quantized, QuantizeOptions("rtn", 128), [])
    ensure_engine(quantized, engine_dir)
    return engine_dir


if __name__ == "__main__":
    main()
