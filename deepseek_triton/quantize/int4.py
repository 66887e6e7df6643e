"""INT4 weights in memory, whatever file they come from or go to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SYMMETRIC_ZERO = 8
"""The code that stands for 0 where there are no zero points."""


@dataclass(frozen=True, eq=False)
class Int4Weight:
    """A linear layer's weight [N, K] in 4 bits.

    value[n, k] = (codes[n, k] − zero_point) · scale, with the zero point and the scale of the row n
    and the group k // group_size. G = ceil(K / group_size).

    Raises ValueError for shapes or types that do not belong together.
    """

    codes: NDArray[np.uint8]  # [N, K], 0 … 15
    scales: NDArray[np.float32]  # [N, G]
    zero_points: NDArray[np.uint8] | None  # [N, G], 0 … 15; None: 8 everywhere (symmetric)
    group_size: int
    input_order: NDArray[np.int32] | None = None  # [K]: column j multiplies x[:, input_order[j]]

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or self.codes.dtype != np.uint8:
            raise ValueError(f"codes are {self.codes.dtype} {self.codes.shape}, not uint8 [N, K]")
        if self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}")
        rows, columns = self.codes.shape
        per_group = (rows, -(-columns // self.group_size))
        if self.scales.shape != per_group or self.scales.dtype != np.float32:
            raise ValueError(f"scales are {self.scales.dtype} {self.scales.shape}, not {per_group}")
        zeros = self.zero_points
        if zeros is not None and (zeros.shape != per_group or zeros.dtype != np.uint8):
            raise ValueError(f"zero points are {zeros.dtype} {zeros.shape}, not uint8 {per_group}")
        order = self.input_order
        if order is not None and not np.array_equal(np.sort(order), np.arange(columns)):
            raise ValueError(f"input_order is not an order of {columns} columns")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        rows, columns = self.codes.shape
        return rows, columns

    def dequantize(self) -> NDArray[np.float32]:
        """Return the values [N, K]; column k multiplies x[:, k], input_order being undone.

        Exact where the scales come from float16 or bfloat16: 5 bits times at most 11.
        """
        rows, columns = self.shape
        padding = -columns % self.group_size
        codes = np.pad(self.codes, ((0, 0), (0, padding))) if padding else self.codes
        grouped = codes.reshape(rows, -1, self.group_size).astype(np.float32)
        zeros: Any = SYMMETRIC_ZERO if self.zero_points is None else self.zero_points[..., None]
        grouped -= np.float32(zeros)
        grouped *= self.scales[..., None]
        values = grouped.reshape(rows, -1)[:, :columns]
        if self.input_order is None:
            return np.ascontiguousarray(values)
        ordered = np.empty_like(values)
        ordered[:, self.input_order] = values
        return ordered


@dataclass(frozen=True, eq=False)
class Int4Format:
    """What can be known of an Int4Weight before its codes are read."""

    group_size: int
    symmetric: bool
    input_order: NDArray[np.int32] | None = None

    def matches(self, other: Int4Format) -> bool:
        """Whether two weights can be joined row after row into one."""
        return self.group_size == other.group_size and np.array_equal(
            _order(self.input_order), _order(other.input_order)
        )


def _order(input_order: NDArray[np.int32] | None) -> NDArray[np.int32]:
    return np.empty(0, np.int32) if input_order is None else input_order


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack codes […, K], K even, into bytes […, K/2], the first of two codes in the low half."""
    packed: NDArray[np.uint8] = codes[..., 1::2] << 4
    packed |= codes[..., ::2]
    return packed


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the codes […, 2·n] in bytes […, n]; the inverse of pack_nibbles."""
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., ::2])
    np.right_shift(packed, 4, out=codes[..., 1::2])
    return codes


def unpack_words(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return the codes […, 8·n] in 32-bit words […, n], lowest bits first."""
    contiguous = np.ascontiguousarray(words).astype("<i4", copy=False)
    return unpack_nibbles(contiguous.view(np.uint8))
