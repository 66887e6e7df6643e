"""How the rows of a step become calls of the model: padded [B, S] groups that waste little.

A call reads all weights once, so one call for all rows would be best if the rows were alike. But
its B · S tokens and B · L keys include padding, which costs as much as real ones. So a row joins
a group when that costs less than a call of its own, by this model of the cost, in units of one
token's linear layers:

    cost(B, S, L) = 8 + B · (S + L · (4 + S) / 1024)

8: reading the weights, as decode is bound by memory. L · 4 / 1024: gathering L cached rows.
L · S / 1024: scores and their product with the values. (Measured on two cores with the
391M-parameter reference model; the ratios change little with the model.) Typically all decodes form
one call, prompts of similar length share one, and a long prompt has its own. On a GPU the fixed
cost is that of hundreds of tokens (GPU_COSTS), and only very unlike rows are apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_KEYS_PER_TOKEN = 1024.0
_GATHER_COST = 4.0


@dataclass(frozen=True)
class CallCosts:
    """What a provider's calls cost."""

    call: float  # of a call, in units of one token's linear layers
    max_scores: int  # most attention scores (heads · B · S · L) of one layer in one call


CPU_COSTS = CallCosts(8.0, 32 << 20)
"""128 MiB of scores in float32."""
GPU_COSTS = CallCosts(512.0, 256 << 20)
"""Weights read at 4 TB/s take the time of some 500 tokens; 1 GiB of scores, and as much again."""


class Row(Protocol):
    """What the plan depends on."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[n ≥ 1] tokens to compute."""

    @property
    def context_len(self) -> int:
        """Tokens in the cache before the first one."""


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one row that run in one call."""

    row: int  # index in the step
    start: int  # index of the first token in the row's token_ids
    length: int  # tokens
    context_len: int  # tokens in the cache before the first one

    @property
    def num_keys(self) -> int:
        """Tokens that the piece's last token attends to, itself included."""
        return self.context_len + self.length


def plan_calls(
    rows: Sequence[Row], *, num_heads: int, costs: CallCosts = CPU_COSTS
) -> list[tuple[Piece, ...]]:
    """Return the calls of a step in order; the pieces of a row are in different calls, in order.

    A row is cut into pieces when its scores alone would exceed `costs.max_scores`.
    """
    max_pairs = costs.max_scores // num_heads
    calls: list[tuple[Piece, ...]] = []
    pending = [_pieces(index, row, max_pairs) for index, row in enumerate(rows)]
    while heads := [piece for pieces in pending if (piece := next(pieces, None))]:
        calls += _group(heads, max_pairs, costs.call)
    return calls


def _pieces(index: int, row: Row, max_pairs: int) -> Iterator[Piece]:
    """Cut a row so that length · num_keys ≤ max_pairs, or length is 1."""
    start, total = 0, len(row.token_ids)
    while start < total:
        context_len = row.context_len + start
        length = total - start
        while length > 1 and length * (context_len + length) > max_pairs:
            length = -(-length // 2)
        yield Piece(index, start, length, context_len)
        start += length


def _group(pieces: list[Piece], max_pairs: int, call: float) -> list[tuple[Piece, ...]]:
    groups: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda p: (-p.length, -p.num_keys)):
        if groups and _joins(groups[-1], piece, max_pairs, call):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return [tuple(group) for group in groups]


def _joins(group: list[Piece], piece: Piece, max_pairs: int, call: float) -> bool:
    longest = group[0].length
    keys = max(p.num_keys for p in group)
    joint_keys = max(keys, piece.num_keys)
    if (len(group) + 1) * longest * joint_keys > max_pairs:
        return False
    joint = _rows_cost(len(group) + 1, longest, joint_keys)
    apart = _rows_cost(len(group), longest, keys) + _rows_cost(1, piece.length, piece.num_keys)
    return joint <= call + apart


def _rows_cost(batch: int, length: int, keys: int) -> float:
    return batch * (length + keys * (_GATHER_COST + length) / _KEYS_PER_TOKEN)
