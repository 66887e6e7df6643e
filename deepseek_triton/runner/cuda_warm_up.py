"""Compile at the start what no graph holds, so that no request waits for a compiler.

For prompts of any length a kernel is compiled for each size class of its tiles and buffers, and
once more for token counts that are multiples of 16. Graphs cover short whole prompts alone; this
runs the other prefill steps, and the ways to choose a token that differ in their kernels.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from deepseek_triton.request import SamplingParams
from deepseek_triton.runner.base import RowSampling
from deepseek_triton.runner.cuda_graphs import Compute
from deepseek_triton.runner.cuda_sampling import choose
from deepseek_triton.runner.cuda_step import Prefill, Step

_ROW = 128  # tokens of a row
_DIVISOR = 16
_FEWEST = 3


def step_sizes(limit: int) -> list[int]:
    """Return ascending token counts up to `limit`: in each size class one that 16 divides or not.

    Classes begin at powers of two, and some half way between two of them.
    """
    sizes, size = {_FEWEST}, _DIVISOR
    while size < limit:
        half = size + size // 2
        sizes |= {size, size + 1, half // _DIVISOR * _DIVISOR, half + 1}
        size *= 2
    return [*sorted(n for n in sizes if n < limit), limit]


def warm_up(
    compute: Compute,
    pools: dict[str, Tensor],
    max_tokens: int,
    device: torch.device,
) -> None:
    """Run prefill steps of up to `max_tokens` tokens, with and without context, and draw a token.

    Their tokens are padding. What a step may leave in `pools` is no request's: none has come yet.
    """
    with torch.inference_mode():
        for tokens in step_sizes(max_tokens):
            for context in (0, 1):
                logits = compute(_padding(tokens, context, pools, device))[0]
        for row in _choices():
            choose(logits[:1], [row])


def _choices() -> list[RowSampling]:
    """Return a row for each way to choose a token: with and without penalties and bans."""
    one = np.zeros(1, np.int32)
    return [
        RowSampling(SamplingParams(1.0, presence_penalty=penalty), 0.5, banned, one, one)
        for penalty in (0.0, 1.0)
        for banned in (None, 0)
    ]


def _padding(tokens: int, context: int, pools: dict[str, Tensor], device: torch.device) -> Step:
    """Return a step of rows of padding that see `context` cached tokens each, all in slot 0."""
    q_lens = (_ROW,) * (tokens // _ROW) + ((tokens % _ROW,) if tokens % _ROW else ())
    k_lens = tuple(length + context for length in q_lens)
    cu_q = torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, *accumulate(k_lens)], dtype=torch.int32, device=device)
    nowhere = torch.full((tokens,), -1, dtype=torch.int32, device=device)
    key_slots = torch.zeros(sum(k_lens), dtype=torch.int64, device=device) if context else None
    return Step(
        input_ids=torch.zeros_like(nowhere),
        positions=nowhere,
        slots=nowhere,
        logit_rows=cu_q[1:].long() - 1,
        attention=Prefill(q_lens, k_lens, cu_q, cu_k, key_slots),
        pools=pools,
    )
