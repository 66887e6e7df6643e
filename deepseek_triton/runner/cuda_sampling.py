"""From logits on the device to one token a row and its log prob, packed for one small copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepseek_triton.request import TopLogProbs
from deepseek_triton.runner.base import RowSampling, StepRow
from deepseek_triton.runner.cuda_device import sent
from deepseek_triton.runner.sampler import sample, top_log_probs


def greedy(logits: Tensor) -> Tensor:
    """Return [2, n] int32: the likeliest token of each row of logits [n, V], its log prob's bits.

    As runner/sampler.py: a row without a finite maximum, or of zeros alone, gets −1 and NaN; the
    lower id wins a tie.
    """
    if logits.is_cuda:
        from deepseek_triton.kernels.sampling import sample as sample_on_device

        packed: Tensor = sample_on_device(logits)
        return packed
    wide = logits.float()
    peaks, token_ids = wide.max(dim=-1)
    log_probs = -(wide - peaks[:, None]).exp().sum(dim=-1, dtype=torch.float64).log().float()
    usable = peaks.isfinite() & ((peaks != 0) | (wide.amin(dim=-1) != 0))
    token_ids = torch.where(usable, token_ids, -1).int()
    log_probs = torch.where(usable, log_probs, torch.nan)
    return torch.stack((token_ids, log_probs.view(torch.int32)))


def refuse_overflowed(packed: Tensor, norms: Tensor, ends: Tensor) -> None:
    """Give −1 to each row of packed [2, R] with a token whose `norms` [T, 1] are not finite.

    ends [R + 1] int32 are the running sums of the rows' lengths. Mutates `packed`.
    """
    overflowed = ~(norms[:, 0] < torch.inf)  # NaN as well
    before = torch.nn.functional.pad(overflowed.cumsum(0, dtype=torch.int32), (1, 0))
    at_ends = before.index_select(0, ends)
    packed[0].masked_fill_(at_ends[1:] != at_ends[:-1], -1)


def choose(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """As `greedy`, of logits [n, V] for n rows that ask for more.

    On the device, but for rows with biased or allowed tokens: those sets live on the host.
    """
    on_host = any(row.allowed is not None or row.params.logit_bias for row in rows)
    if on_host or not logits.is_cuda:
        token_ids, log_probs = sample(logits.float().cpu().numpy(), rows)
        return torch.from_numpy(np.stack((token_ids, log_probs.view(np.int32))))
    from deepseek_triton.kernels.sampling import sample as sample_on_device
    from deepseek_triton.kernels.sampling import sampling_row

    settings = [sampling_row(row.params, row.uniform) for row in rows]
    bans = [[i for i in (row.banned_id, *row.more_banned_ids) if i is not None] for row in rows]
    most = max(map(len, bans))
    banned = [ids + [-1] * (most - len(ids)) for ids in bans]
    packed: Tensor = sample_on_device(
        logits,
        sent(torch.tensor(settings, dtype=torch.float32), logits.device),
        token_counts=_token_counts(rows, logits) if any(r.params.penalized for r in rows) else None,
        banned=sent(torch.tensor(banned, dtype=torch.int32), logits.device) if most else None,
    )
    return packed


def _token_counts(rows: Sequence[RowSampling], logits: Tensor) -> Tensor:
    """Return [n, V] int32 for rows with penalties: how often each token is in the output, and
    whether it is in the prompt.
    """
    from deepseek_triton.kernels.sampling import IN_PROMPT

    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    for i, row in enumerate(rows):
        if row.params.penalized:
            prompt, output = (
                sent(torch.from_numpy(np.ascontiguousarray(ids, np.int64)), logits.device)
                for ids in (row.prompt_token_ids, row.output_token_ids)
            )
            counts[i].index_fill_(0, prompt, IN_PROMPT)
            counts[i].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
    return counts


def score(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return [2, n] int32: the likeliest token of each row of logits [n, V], and the bits of the
    log prob of token_ids [n].

    As runner/sampler.py: rows that `greedy` refuses get −1 and NaN.
    """
    packed = greedy(logits)
    best_ids, of_best = packed[0], packed[1].view(torch.float32)
    pairs = torch.stack((token_ids, best_ids.clamp(min=0)), dim=1).long()
    given, best = logits.gather(1, pairs).float().unbind(dim=1)
    log_probs = torch.where(best_ids < 0, torch.nan, (given - best + of_best).clamp(max=0.0))
    return torch.stack((best_ids, log_probs.view(torch.int32)))


def unpack(packed: Tensor) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Split what `greedy` or `choose` returned, on the host: token ids [n] and log probs [n]."""
    token_ids, bits = packed.numpy()
    return token_ids, bits.view(np.float32)


def likeliest(logits: Tensor, rows: Sequence[StepRow]) -> tuple[TopLogProbs, ...]:
    """Return the likeliest tokens of rows that ask for some, of logits [n, V]; () if none does."""
    if not any(row.sampling is not None and row.sampling.params.top_log_probs for row in rows):
        return ()
    counts = [0 if row.sampling is None else row.sampling.params.top_log_probs for row in rows]
    return top_log_probs(logits.float().cpu().numpy(), counts)


def asks_for_more(row: RowSampling) -> bool:
    """Whether the likeliest token of the unmodified logits is not the answer."""
    return not row.plain
