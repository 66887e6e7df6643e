"""Sampling: cases of linear_check.py, against the host's sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import check_data
import numpy as np
import torch
from check_data import Case

from deepseek_triton.kernels.sampling import sample, sampling_row
from deepseek_triton.request import SamplingParams
from deepseek_triton.runner.base import RowSampling
from deepseek_triton.runner.sampler import sample as host_sample

KINDS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(temperature=0.8, top_k=50),
    "top-p": SamplingParams(temperature=0.8, top_p=0.95),
    "top-k and top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
}


def sampling_cases() -> Iterator[Case]:
    """Yield the choice of tokens from V2-Lite's vocabulary."""
    for kind in KINDS:
        for rows in (1, 8, 64):
            yield sampling_case(kind, rows, 102400)
    for kind in KINDS:
        yield refused_case(kind, 102400)


def sampling_case(kind: str, rows: int, vocab: int) -> Case:
    """One kind of sampling for all rows; the error counts tokens that the host would not draw."""

    def prepare() -> Callable[[int], Any]:
        logits = torch.randn(rows, vocab, device=check_data.DEVICE) * 4
        params, draws = KINDS[kind], np.random.default_rng(rows).random(rows, np.float32)
        table = [sampling_row(params, float(u)) for u in draws]
        device_rows = None if params.greedy else torch.tensor(table, device=check_data.DEVICE)
        nothing = np.empty(0, np.int32)
        host_rows = [RowSampling(params, float(u), None, nothing, nothing) for u in draws]
        return lambda i: (logits, host_rows, sample(logits, device_rows))

    def check(run: Callable[[int], Any]) -> float:
        logits, host_rows, chosen = run(0)
        want, _ = host_sample(logits.cpu().numpy(), host_rows)
        return float((chosen[0].cpu().numpy() != want).mean())

    moved = rows * vocab * 4
    return Case(f"sample {kind} B={rows}", prepare, check, moved, tolerance=0.02)


def refused_case(kind: str, vocab: int) -> Case:
    """Rows that are not finite between usual ones; the error counts tokens unlike the host's."""

    def prepare() -> Callable[[int], Any]:
        logits = torch.randn(16, vocab, device=check_data.DEVICE) * 4
        inf, middle = float("inf"), vocab // 2
        for row, (where, value) in enumerate(
            (
                (vocab - 1, torch.nan), (slice(None), torch.nan), (middle, inf),
                (slice(None), inf), (slice(middle), -inf), (slice(None), -inf),
                (slice(vocab - 1), -inf), (slice(None), 0.0), (slice(vocab - 1), 0.0),
            )
        ):  # fmt: skip
            logits[row, where] = value
        params = KINDS[kind]
        table = [sampling_row(params, 0.37)] * len(logits)
        device_rows = None if params.greedy else torch.tensor(table, device=check_data.DEVICE)
        nothing = np.empty(0, np.int32)
        host_rows = [RowSampling(params, 0.37, None, nothing, nothing)] * len(logits)
        return lambda i: (logits, host_rows, sample(logits, device_rows))

    def check(run: Callable[[int], Any]) -> float:
        logits, host_rows, chosen = run(0)
        want, _ = host_sample(logits.cpu().numpy(), host_rows)
        same = chosen[0].cpu().numpy() == want
        refused = chosen[1].view(torch.float32).isnan().cpu().numpy() == (want < 0)
        return float(1 - (same & refused).mean())

    return Case(f"sample {kind}, rows not finite", prepare, check, timed=False, tolerance=0.0)
