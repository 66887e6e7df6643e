"""What drafts of the multi-token-prediction layer bring: the demo model with and without, in turns.

The same greedy requests run through StepEngine on both engines, 2 threads: 128 tokens after the
head of a function. Their tokens must be equal, or nothing is recorded.

    python perf/bench_speculation.py       # writes perf/results/speculation.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from bench_engine import CACHE
from record import save_result

ROOT = Path(__file__).resolve().parents[1]
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


def generate(engine_dir: Path, batch_size: int) -> tuple[dict[str, float], list[list[int]]]:
    """Run the requests; return tokens/s with the drafts' counts, and every request's tokens."""
    from deepseek_triton.config import SchedulerConfig
    from deepseek_triton.engine.engine import StepEngine
    from deepseek_triton.request import Request, RequestKey
    from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
    from deepseek_triton.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(engine_dir)
    runner = OnnxRuntimeRunner.load(engine_dir, num_blocks=512, num_threads=THREADS)
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
    engine.close()
    measured = {
        "tokens_per_s": (sum(map(len, tokens)) - before) / seconds,
        "drafts": stats.draft_tokens_total,
        "accepted": stats.draft_tokens_accepted_total,
    }
    return measured, tokens


def compare(plain: Path, drafting: Path, batch_size: int, rounds: int) -> dict[str, Any]:
    """Measure both engines in turns; raises RuntimeError if their tokens differ."""
    sides: dict[str, list[dict[str, float]]] = {"plain": [], "drafting": []}
    for _ in range(rounds):
        one, expected = generate(plain, batch_size)
        other, tokens = generate(drafting, batch_size)
        if tokens != expected:
            raise RuntimeError(f"drafts changed the tokens of a batch of {batch_size}")
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
        "rounds": sides,
    }


def main() -> None:
    """Build both engines, measure every batch size and keep the result."""
    from deepseek_triton.server.engine_cache import ensure_engine

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    plain, drafting = CACHE / "demo-plain", CACHE / "demo-drafting"
    ensure_engine(ROOT / "models" / "demo", plain)
    ensure_engine(ROOT / "models" / "demo", drafting, draft=True)
    measured = {}
    for batch_size in BATCH_SIZES:
        result = compare(plain, drafting, batch_size, rounds)
        measured[f"batch_{batch_size}"] = result
        print(batch_size, {k: v for k, v in result.items() if k != "rounds"})
    print(save_result("speculation", measured))


if __name__ == "__main__":
    main()
