"""What drafts of the multi-token-prediction layer bring: the demo model with and without, in turns.

The same greedy requests run through StepEngine on both engines: 128 tokens after the head of a
function. On ONNX Runtime (2 threads) their tokens must be equal, or nothing is recorded; kernels of
a GPU round by the size of the batch, so there the share of equal tokens is recorded.

    python perf/bench_speculation.py                 # writes perf/results/speculation.json
    python perf/bench_speculation.py --target cuda   # bf16; perf/results/speculation_cuda.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from bench_engine import CACHE
from record import save_result

from deepseek_triton.build.engine_dir import load_engine_dir
from deepseek_triton.build.pipeline import build_engine, is_current
from deepseek_triton.config import SchedulerConfig
from deepseek_triton.engine.engine import StepEngine
from deepseek_triton.request import Request, RequestKey
from deepseek_triton.runner.base import ModelRunner
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
from deepseek_triton.text.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
BATCH_SIZES = (1, 4, 8, 16)
THREADS = 2
OUTPUT_TOKENS = 128
HEADS = (
    "def clip(value, lower, upper):\n",
    'def read_lines(path):\n    """Return the lines of a file."""\n',
    'class Point:\n    """A point in the plane."""\n\n    def __init__(self, x, y):\n',
    "def test_add():\n",
    "import os\n\n\ndef find_files(folder, suffix):\n",
    "def parse_args():\n    parser = ",
    "class Node:\n    def __init__(self, value, children):\n",
    "def __eq__(self, other):\n",
)


def open_runner(engine_dir: Path) -> ModelRunner:
    """Load an engine of either target."""
    engine = load_engine_dir(engine_dir)
    if engine.manifest.target == "onnxruntime":
        return OnnxRuntimeRunner(engine, num_blocks=512, num_threads=THREADS)
    from deepseek_triton.runner.cuda import CudaRunner

    limits = {"max_batch_size": max(BATCH_SIZES), "max_context_len": 1024}
    return CudaRunner.open(engine, num_blocks=512, **limits)


def generate(
    runner: ModelRunner, tokenizer: Tokenizer, batch_size: int
) -> tuple[dict[str, float], list[list[int]]]:
    """Run the requests; return tokens/s with the drafts' counts, and every request's tokens."""
    engine = StepEngine(runner, SchedulerConfig(max_batch_size=max(BATCH_SIZES)))
    tokens: list[list[int]] = [[] for _ in range(batch_size)]
    for index, received in enumerate(tokens):
        ids = tuple(tokenizer.encode(f"# {index}\n" + HEADS[index % len(HEADS)]))
        request = Request(RequestKey(str(index)), ids, OUTPUT_TOKENS)
        engine.submit(request, lambda output, to=received: to.extend(output.token_ids))
    while not all(tokens):  # prompts are not what is measured
        engine.step()
    before, started = sum(map(len, tokens)), time.perf_counter()
    while engine.has_requests:
        engine.step()
    seconds = time.perf_counter() - started
    stats = engine.stats()
    measured = {
        "tokens_per_s": (sum(map(len, tokens)) - before) / seconds,
        "drafts": stats.draft_tokens_total,
        "accepted": stats.draft_tokens_accepted_total,
    }
    return measured, tokens


def compare(
    plain: ModelRunner,
    drafting: ModelRunner,
    tokenizer: Tokenizer,
    batch_size: int,
    rounds: int,
    *,
    exact: bool,
) -> dict[str, Any]:
    """Measure both in turns; raises RuntimeError if their tokens differ but should be `exact`."""
    sides: dict[str, list[dict[str, float]]] = {"plain": [], "drafting": []}
    for _ in range(rounds):
        one, expected = generate(plain, tokenizer, batch_size)
        other, tokens = generate(drafting, tokenizer, batch_size)
        if exact and tokens != expected:
            raise RuntimeError(f"drafts changed the tokens of a batch of {batch_size}")
        other["same_tokens"] = float(np.mean(np.array(tokens) == np.array(expected)))
        sides["plain"].append(one)
        sides["drafting"].append(other)
    rates = {
        side: statistics.median(run["tokens_per_s"] for run in runs) for side, runs in sides.items()
    }
    last = sides["drafting"][-1]
    return {
        "plain_tokens_per_s": round(rates["plain"], 1),
        "drafting_tokens_per_s": round(rates["drafting"], 1),
        "speed_up": round(rates["drafting"] / rates["plain"], 3),
        "acceptance": round(last["accepted"] / last["drafts"], 3),
        "same_tokens": round(last["same_tokens"], 3),
        "rounds": sides,
    }


def main() -> None:
    """Build both engines, measure every batch size and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--target", choices=("onnxruntime", "cuda"), default="onnxruntime")
    arguments = parser.parse_args()
    cuda = arguments.target == "cuda"
    build = {"target": "cuda", "precision": "bf16"} if cuda else {}
    name = "-cuda" if cuda else ""
    folders = CACHE / f"demo-plain{name}", CACHE / f"demo-drafting{name}"
    for folder, draft in zip(folders, (False, True), strict=True):
        if not is_current(folder, DEMO, draft=draft, **build):
            build_engine(DEMO, folder, draft=draft, **build)
    measured = measure(*folders, arguments.rounds)
    print(save_result("speculation_cuda" if cuda else "speculation", measured))


def measure(plain: Path, drafting: Path, rounds: int) -> dict[str, Any]:
    """Return what `compare` finds of the two engine directories, by batch size."""
    tokenizer = Tokenizer.load(plain)
    measured = {}
    with closing(open_runner(plain)) as one, closing(open_runner(drafting)) as other:
        exact = isinstance(one, OnnxRuntimeRunner)
        for batch_size in BATCH_SIZES:
            result = compare(one, other, tokenizer, batch_size, rounds, exact=exact)
            measured[f"batch_{batch_size}"] = result
            print(batch_size, {k: v for k, v in result.items() if k != "rounds"}, flush=True)
    return measured


if __name__ == "__main__":
    main()
