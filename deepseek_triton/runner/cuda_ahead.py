"""Decode steps that are launched before the tokens they begin with are known to the host.

    host    launch n+1 │ wait for n │ its outputs, rows of n+1 and n+2 │ launch n+2 │ wait for n+1 …
    device  n ─────────────────────▶ n+1 ─────────────────────────────────────────▶ n+2 …

Tokens go from one step to the next on the device. What the host learns meanwhile (a request has
ended, was cancelled or preempted) costs its row in the step under way and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepseek_triton.runner.base import FollowingRow, StepRow


@dataclass(frozen=True)
class Drawn:
    """What some rows of a step draw: on the device, and on its way to the host."""

    rows: list[int]  # indices in the step
    columns: list[int]  # of each row in the two below
    token_ids: Tensor  # [N] int32 on the device; −1 where none could be drawn
    packed: Tensor  # [2, N] int32 on the host once the device is there: see cuda_sampling.greedy

    @classmethod
    def fetch(cls, rows: Sequence[int], packed: Tensor) -> Drawn:
        """Begin to fetch packed [2, N ≥ rows]; a copy of its ids outlives the graph's memory."""
        columns = list(range(len(rows)))
        return cls(list(rows), columns, packed[0].clone(), packed.to("cpu", non_blocking=True))


@dataclass(frozen=True)
class FutureTokens:
    """Token ids that only the device knows."""

    token_ids: Tensor  # [N] int32 on the device
    places: list[int]  # [n] of the rows' tokens among them

    @classmethod
    def of(cls, parts: Sequence[Drawn], rows: Sequence[int]) -> FutureTokens:
        """Return what the rows with these indices draw; `parts` hold all of them."""
        places: dict[int, int] = {}
        begin = 0
        for part in parts:
            places |= {row: begin + at for row, at in zip(part.rows, part.columns, strict=True)}
            begin += len(part.token_ids)
        ids = parts[0].token_ids if len(parts) == 1 else torch.cat([p.token_ids for p in parts])
        return cls(ids, [places[row] for row in rows])

    def fill(self, inputs: Tensor) -> None:
        """Put tokens in the place of their places in inputs [≥ n] int32, all of them below N.

        A row whose step drew none gets token 0: it ends, and what follows is for nobody.
        """
        inputs.copy_(self.token_ids.index_select(0, inputs).clamp_(min=0))


class Ahead:
    """A decode step under way, until the host knows whether it is the one it wants."""

    def __init__(self, following: Sequence[FollowingRow], packed: Tensor) -> None:
        """`packed` [2, ≥ rows] is what the step draws."""
        self._sources = [each.source for each in following]
        self._places = {
            (each.row.request_key, each.row.context_len): i for i, each in enumerate(following)
        }
        self._drawn = Drawn.fetch(range(len(following)), packed)
        self._inputs: list[int] = []

    def fed(self, token_ids: NDArray[np.int32]) -> None:
        """Learn what the step before drew for each of its rows: the tokens that this one read."""
        self._inputs = token_ids[self._sources].tolist()

    def take(self, rows: Sequence[StepRow]) -> Drawn | None:
        """Return what was computed for the decode rows among `rows`, if all of them were."""
        decodes = [i for i, row in enumerate(rows) if len(row.token_ids) == 1]
        columns = [
            self._places.get((rows[i].request_key, rows[i].context_len), -1) for i in decodes
        ]
        if not decodes or min(columns) < 0:
            return None
        if any(
            self._inputs[c] != rows[i].token_ids[0] for i, c in zip(decodes, columns, strict=True)
        ):
            return None
        return Drawn(decodes, columns, self._drawn.token_ids, self._drawn.packed)
