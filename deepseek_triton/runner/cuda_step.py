"""One step on the device: packed rows, where their KV goes, and what attention looks at.

Tokens of all rows follow one another, T in all, without padding between them. A decode step has one
token a row; a prefill step has ragged rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepseek_triton.runner.base import StepRow
from deepseek_triton.runner.cuda_batch import RaggedRows
from deepseek_triton.runner.cuda_device import sent

_ALIGNED = 4  # int32 numbers in 16 bytes


@dataclass(frozen=True)
class Decode:
    """Attention of one token a row; T = B. All sizes that change are on the device."""

    block_tables: Tensor  # [B, M] int32; entries beyond a row's blocks are any valid block
    context_lens: Tensor  # [B] int32 keys of each row, its new token included; 0 = padding row


@dataclass(frozen=True)
class Prefill:
    """Attention of ragged rows over their cached and new tokens."""

    q_lens: tuple[int, ...]  # new tokens of each row
    k_lens: tuple[int, ...]  # keys of each row, new tokens included
    cu_q: Tensor  # [R + 1] int32 running sums of q_lens
    cu_k: Tensor  # [R + 1] int32 running sums of k_lens
    key_slots: Tensor | None  # [sum of k_lens] int64 pool slots of all keys; None: no context


@dataclass(frozen=True)
class Step:
    """Inputs of one run of the model."""

    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32; −1 = padding
    slots: Tensor  # [T] int32 pool slot (block · block_size + offset) of each token; −1 = padding
    logit_rows: Tensor | None  # [R] int64 tokens whose logits are wanted; None = all
    attention: Decode | Prefill
    pools: dict[str, Tensor] = field(repr=False)  # graph input name → [N, block_size, W]
    hidden: Tensor | None = None  # [T, D] of the model at these tokens, for its draft model


def packed_step(rows: Sequence[StepRow], pools: dict[str, Tensor], device: torch.device) -> Step:
    """Return a prefill step of `rows`, one after another, with the logits of their last tokens."""
    arrays = RaggedRows(rows, next(iter(pools.values())).shape[1])
    ids, positions, slots, cu_q, cu_k, logit_rows, key_slots = _in_one_copy(arrays.parts(), device)
    attention = Prefill(
        arrays.q_lens,
        arrays.k_lens,
        cu_q,
        cu_k,
        key_slots.long() if arrays.has_context else None,
    )
    return Step(ids, positions, slots, logit_rows.long(), attention, pools)


def _in_one_copy(parts: Sequence[NDArray[Any]], device: torch.device) -> Iterator[Tensor]:
    """Yield each of `parts` [n] as int32 on the device.

    All begin at multiples of 16 bytes, as tensors of their own would: kernels are compiled once
    more for pointers that do not.
    """
    starts = np.cumsum([0, *(-(-len(part) // _ALIGNED) * _ALIGNED for part in parts)])
    host = np.zeros(starts[-1], np.int32)
    for start, part in zip(starts, parts, strict=False):
        host[start : start + len(part)] = part
    joined = sent(torch.from_numpy(host), device)
    for start, part in zip(starts.tolist(), parts, strict=False):
        yield joined[start : start + len(part)]
