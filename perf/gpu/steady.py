"""Ten thousand steps of changing batches: device memory stays as it is, no graph is added.

The cache is small and answers are long, so that requests are preempted and computed again.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from measure import make_model, make_runner
from random_model import V2_LITE, make_spec

from deepseek_triton.config import SchedulerConfig
from deepseek_triton.engine.engine import StepEngine
from deepseek_triton.request import Request, RequestKey, SamplingParams, TokenOutput

STEPS, SETTLED, SAMPLED = 10_000, 1_000, 500
MAX_BATCH = 64
NUM_BLOCKS = 96  # of 64 tokens: about half of what the requests would take


def steady_state(steps: int = STEPS) -> dict[str, Any]:
    """Steps with requests that come, draw, end, are cancelled and preempted; memory over time.

    Raises RuntimeError if none was preempted or one failed.
    """
    spec = make_spec(V2_LITE, num_hidden_layers=3, vocab_size=32768)  # draws are quick then
    runner = make_runner(make_model(spec), spec, num_blocks=NUM_BLOCKS, max_batch_size=MAX_BATCH)
    config = SchedulerConfig(max_batch_size=MAX_BATCH, max_tokens_per_step=1024)
    engine = StepEngine(runner, config)
    rng = np.random.default_rng(5)
    live: dict[str, int] = {}
    memory: list[tuple[int, int]] = []
    counts = {"submitted": 0, "cancelled": 0, "failed": 0, "tokens": 0, "largest_batch": 0}

    def emit(output: TokenOutput) -> None:
        counts["tokens"] += len(output.token_ids)
        counts["failed"] += output.error is not None
        if output.finish_reason is not None:
            live.pop(output.request_key, None)

    started = time.perf_counter()
    for step in range(steps):
        target = int(MAX_BATCH * (0.5 + 0.6 * np.sin(step / 150)))
        while len(live) < target:
            key = f"r{counts['submitted']}"
            counts["submitted"] += 1
            live[key] = step
            engine.submit(request(key, rng, spec.vocab_size), emit)
        if rng.random() < 0.05 and live:
            engine.abort(RequestKey(str(rng.choice(list(live)))))
            counts["cancelled"] += 1
        engine.step()
        counts["largest_batch"] = max(counts["largest_batch"], engine.stats().requests_active)
        if step % SAMPLED == SAMPLED - 1:
            free = torch.cuda.mem_get_info()[0]
            memory.append((torch.cuda.memory_reserved(), free))
    seconds = time.perf_counter() - started
    settled = memory[SETTLED // SAMPLED - 1 :]
    stats = engine.stats()
    result = {
        **counts,
        "steps": steps,
        "seconds": round(seconds, 1),
        "preemptions": stats.preemptions_total,
        "reserved_bytes": [reserved for reserved, _ in memory],
        "free_bytes": [free for _, free in memory],
        "growth_bytes": settled[-1][0] - settled[0][0],
        "flat_second_half": len(set(memory[len(memory) // 2 :])) == 1,
    }
    engine.close()
    print(f"  {result}")
    if not result["preemptions"] or counts["failed"]:
        raise RuntimeError(f"no request was preempted, or some failed: {result}")
    return result


def request(key: str, rng: np.random.Generator, vocab_size: int) -> Request:
    """A prompt of 1 to 160 tokens, up to 1,000 more; a third of them drawn, some with penalties."""
    prompt = rng.integers(0, vocab_size, int(rng.integers(1, 160)))
    kind = rng.integers(0, 6)
    sampling = SamplingParams()
    if kind == 0:
        sampling = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=1)
    elif kind == 1:
        sampling = SamplingParams(temperature=1.0, repetition_penalty=1.1, return_log_probs=True)
    return Request(
        RequestKey(key), tuple(prompt.tolist()), int(rng.integers(1, 1000)), sampling=sampling
    )
