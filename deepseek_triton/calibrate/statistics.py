"""What is kept of the activations that a linear layer reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass
class Activations:
    """Sums over the tokens of one activation [T, K]."""

    outer: NDArray[np.float32]  # [K, K] Σ xᵀ x
    absolute: NDArray[np.float64]  # [K] Σ |x|
    count: int = 0  # tokens

    @classmethod
    def of_width(cls, width: int) -> Activations:
        """Return empty sums for `width` channels."""
        return cls(np.zeros((width, width), np.float32), np.zeros(width))

    @classmethod
    def of(cls, x: NDArray[np.float32]) -> Activations:
        """Return the sums over `x` [T, K]."""
        sums = cls.of_width(x.shape[1])
        sums.add(x)
        return sums

    def add(self, x: NDArray[np.float32]) -> None:
        """Take in the tokens `x` [T, K]."""
        self.outer += x.T @ x
        self.absolute += np.abs(x).sum(axis=0, dtype=np.float64)
        self.count += len(x)

    @property
    def moment(self) -> NDArray[np.float32]:
        """E[xᵀ x], [K, K]."""
        return self.outer / np.float32(max(self.count, 1))

    @property
    def magnitude(self) -> NDArray[np.float32]:
        """E|x|, [K]."""
        return (self.absolute / max(self.count, 1)).astype(np.float32)
