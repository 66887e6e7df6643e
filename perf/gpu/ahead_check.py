"""Steps launched before the tokens of the step before are known: the same tokens as without.

    python perf/gpu/ahead_check.py

Requests come while others run, greedy and drawn, and end by their length, so that both ways have
the same rows in each step: their tokens must be equal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

import numpy as np
from measure import make_model, make_runner
from random_model import V2_LITE, make_spec

from deepseek_triton.config import SchedulerConfig
from deepseek_triton.engine.engine import StepEngine
from deepseek_triton.request import Request, RequestKey, SamplingParams
from deepseek_triton.runner.base import StepResult, StepRow
from deepseek_triton.runner.cuda import CudaRunner
from deepseek_triton.runner.cuda_ahead import Ahead, Drawn

REQUESTS, ARRIVALS, STEPS_BETWEEN = 96, 4, 9
MAX_BATCH = 64


def answers(runner: CudaRunner, vocab_size: int) -> dict[str, list[int]]:
    """Serve all requests; return their tokens by key."""
    engine = StepEngine(runner, SchedulerConfig(max_batch_size=MAX_BATCH, max_tokens_per_step=2048))
    rng, tokens = np.random.default_rng(11), {str(i): [] for i in range(REQUESTS)}
    step = waiting = 0
    while waiting < REQUESTS or engine.has_requests:
        if step % STEPS_BETWEEN == 0:
            for key in range(waiting, min(waiting + ARRIVALS, REQUESTS)):
                prompt = tuple(rng.integers(0, vocab_size, int(rng.integers(1, 300))).tolist())
                sampling = SamplingParams(temperature=0.8, top_k=20, seed=key) if key % 3 else None
                request = Request(
                    RequestKey(str(key)), prompt, 20 + key * 3, sampling or SamplingParams()
                )
                engine.submit(request, lambda out: tokens[out.request_key].extend(out.token_ids))
            waiting = min(waiting + ARRIVALS, REQUESTS)
        engine.step()
        step += 1
    return tokens


def main() -> int:
    """Print one JSON line; 1 if a token differs, or too few steps were launched ahead."""
    spec = make_spec(V2_LITE, num_hidden_layers=3)
    runner = make_runner(make_model(spec), spec, max_batch_size=MAX_BATCH)
    taken: list[bool] = []
    take, run = Ahead.take, runner.run

    def counted(self: Ahead, rows: Sequence[StepRow]) -> Drawn | None:
        found = take(self, rows)
        taken.append(found is not None)
        return found

    Ahead.take = counted  # type: ignore[method-assign]
    ahead = answers(runner, spec.vocab_size)
    waiting: Callable[..., StepResult] = lambda rows, following=(): run(rows)  # noqa: E731
    runner.run = waiting  # type: ignore[method-assign]
    expected = answers(runner, spec.vocab_size)
    different = [key for key in expected if expected[key] != ahead[key]]
    share = sum(taken) / len(taken)
    total = sum(map(len, ahead.values()))
    print(json.dumps({"tokens": total, "different": different, "share_taken": round(share, 4)}))
    return int(bool(different) or share < 0.9)


if __name__ == "__main__":
    sys.exit(main())
