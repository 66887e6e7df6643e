"""Routed experts one at a time, each over the tokens that reach it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ExpertTokens:
    """The tokens that reach one expert."""

    rows: NDArray[np.intp]  # [n] which of all tokens
    x: NDArray[np.float32]  # [n, D] what the expert reads
    weights: NDArray[np.float32]  # [n, 1] what its output is multiplied by


@dataclass(frozen=True)
class ExpertWeights:
    """One expert's gate and up [F, D] and down [D, F]."""

    gate: NDArray[np.float32]
    up: NDArray[np.float32]
    down: NDArray[np.float32]

    def hidden(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return silu(gate) · up over x [n, D], [n, F]: what down reads."""
        gate = x @ self.gate.T
        with np.errstate(over="ignore"):  # exp(−gate) = inf gives the right 0
            active: NDArray[np.float32] = gate / (1 + np.exp(-gate)) * (x @ self.up.T)
        return active


class Routing:
    """Collects, window by window, which tokens go where."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[Any], ...]] = []
        self._joined: tuple[NDArray[Any], ...] | None = None

    def add(
        self, x: NDArray[np.float32], ids: NDArray[np.int64], weights: NDArray[np.float32]
    ) -> None:
        """Take in the tokens x [S, D], with their experts' ids [S, k] and weights [S, k]."""
        self._parts.append((x, ids, weights))

    def tokens_of(self, expert: int) -> ExpertTokens | None:
        """Return the tokens of `expert`, in order; None if it has none."""
        if self._parts:
            self._joined = tuple(np.concatenate(part) for part in zip(*self._parts, strict=True))
            self._parts = []
        if self._joined is None:
            return None
        x, ids, weights = self._joined
        rows, places = np.nonzero(ids == expert)
        if not len(rows):
            return None
        return ExpertTokens(rows, x[rows], weights[rows, places][:, None])
