"""INT4 weights in memory, whatever file they come from or go to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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
class Int4Linear:
    """A linear layer's INT4 weight that has not been read yet.

    Each callable reads and computes its part anew; their results are those of an Int4Weight.
    """

    name: str  # of the layer in the checkpoint
    file: Path  # that holds the codes, for messages
    shape: tuple[int, int]  # (N, K)
    group_size: int
    symmetric: bool
    input_order: NDArray[np.int32] | None
    codes: Callable[[], NDArray[np.uint8]]
    scales: Callable[[], NDArray[np.float32]]
    zero_points: Callable[[], NDArray[np.uint8] | None]  # None if and only if symmetric

    def read(self) -> Int4Weight:
        """Return the whole weight."""
        return Int4Weight(
            self.codes(), self.scales(), self.zero_points(), self.group_size, self.input_order
        )

    def with_groups_of(self, size: int) -> Int4Linear:
        """Return the same values in smaller groups; `size` divides the group size."""
        if size == self.group_size:
            return self
        if self.group_size % size and self.group_size < self.shape[1]:
            raise ValueError(f"groups of {self.group_size} cannot be cut into groups of {size}")
        copies, groups = -(-self.group_size // size), -(-self.shape[1] // size)

        def scales() -> NDArray[np.float32]:
            return np.repeat(self.scales(), copies, axis=1)[:, :groups]

        def zero_points() -> NDArray[np.uint8] | None:
            zeros = self.zero_points()
            return None if zeros is None else np.repeat(zeros, copies, axis=1)[:, :groups]

        return replace(self, group_size=size, scales=scales, zero_points=zero_points)


def kernel_group_size(columns: int, group_size: int) -> int:
    """Return the group size that kernels take for K = `columns`: 16, 32, 64 or 128 if it can be.

    Groups are cut where they are larger or do not fill K; a single group fills any K. Without a way
    to cut them they stay as they are.
    """
    sizes = (128, 64, 32, 16)
    if group_size >= columns:
        return next((size for size in sizes if columns % size == 0), sizes[0])
    if group_size in sizes and columns % group_size == 0:
        return group_size
    common = math.gcd(columns, group_size)
    return next((size for size in sizes if common % size == 0), group_size)


def common_group_size(layers: Sequence[Int4Linear]) -> int | None:
    """Return the group size in which all of `layers` can be written, or None."""
    sizes = {kernel_group_size(layer.shape[1], layer.group_size) for layer in layers}
    smallest = min(sizes, default=1)
    return smallest if all(size % smallest == 0 for size in sizes) else None


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack codes […, K], K even, into bytes […, K/2], the first of two codes in the low half."""
    pairs = np.ascontiguousarray(codes).view("<u2")  # whole words are several times as fast
    joined = pairs >> np.uint16(4)
    joined |= pairs
    return joined.astype(np.uint8)  # the low half of each


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the codes […, 2·n] in bytes […, n]; the inverse of pack_nibbles."""
    pairs = np.ascontiguousarray(packed).astype("<u2")
    pairs |= pairs << np.uint16(4)
    pairs &= np.uint16(0x0F0F)
    return pairs.view(np.uint8)


def unpack_words(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return the codes […, 8·n] in 32-bit words […, n], lowest bits first."""
    contiguous = np.ascontiguousarray(words).astype("<i4", copy=False)
    return unpack_nibbles(contiguous.view(np.uint8))
