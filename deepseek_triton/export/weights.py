"""Weights on their way from checkpoint views to one external data file.

A weight is declared with its shape and a lazy sequence of blocks; nothing is read before
`WeightFile.write`, which holds one chunk of one block at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from tqdm import tqdm

from deepseek_triton.errors import BuildError
from deepseek_triton.quantize.int4 import Int4Linear, pack_nibbles

UINT4 = np.dtype(ml_dtypes.uint4)
"""Two codes a byte in files, the first in the low half; blocks of codes are uint8, one a byte."""

ALIGNMENT = 4096  # a page, so that any runtime can map each weight by itself
_CHUNK_BYTES = 8 << 20  # of converted output; bounds the memory of a conversion
_RELEASE_BYTES = 64 << 20  # written between two releases of mapped input pages


class TensorReader(Protocol):
    """What export needs of a checkpoint."""

    def require(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return a tensor, preferably a view on a mapped file, after checking its shape."""

    def int4(self, source: str) -> Int4Linear | None:
        """Return the INT4 weight of the linear layer `source`, unread; None if it is dense."""

    def release(self) -> None:
        """Drop mapped pages read so far from memory; arrays stay valid."""


@dataclass(frozen=True)
class _Weight:
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    blocks: Iterable[NDArray[Any]]
    offset: int

    @property
    def nbytes(self) -> int:
        return nbytes(self.shape, self.dtype)


def nbytes(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Return the bytes that an array takes in a file."""
    count = math.prod(shape)
    return -(-count // 2) if dtype == UINT4 else count * dtype.itemsize


class WeightFile:
    """Lays weights out in one file at page-aligned offsets, in order of declaration."""

    def __init__(self) -> None:
        self._weights: list[_Weight] = []
        self._names: set[str] = set()

    @property
    def nbytes(self) -> int:
        """Size of the file that `write` makes."""
        return self._weights[-1].offset + self._weights[-1].nbytes if self._weights else 0

    def add(
        self,
        name: str,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        blocks: Iterable[NDArray[Any]],
    ) -> None:
        """Declare a weight whose elements are those of `blocks` in C order, converted to `dtype`.

        `blocks` is read once, by `write` or `read`.
        """
        offset = -(-self.nbytes // ALIGNMENT) * ALIGNMENT
        self._weights.append(_Weight(name, tuple(shape), dtype, blocks, offset))
        self._names.add(name)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def tensors(
        self, location: str, names: Collection[str] | None = None
    ) -> Iterator[onnx.TensorProto]:
        """Yield one initializer a weight, pointing into the file `location` beside the model.

        `names` restricts them to the weights that one of several models reads.
        """
        for weight in self._weights:
            if names is not None and weight.name not in names:
                continue
            tensor = onnx.TensorProto(
                name=weight.name,
                dims=weight.shape,
                data_type=onnx.helper.np_dtype_to_tensor_dtype(weight.dtype),
                data_location=onnx.TensorProto.EXTERNAL,
            )
            entries = {"location": location, "offset": weight.offset, "length": weight.nbytes}
            for key, value in entries.items():
                tensor.external_data.add(key=key, value=str(value))
            yield tensor

    def read(self, name: str) -> NDArray[Any]:
        """Return one weight in memory, as `write` would store it."""
        weight = next(w for w in self._weights if w.name == name)
        data = b"".join(_chunks(weight))
        return np.frombuffer(data, weight.dtype).reshape(weight.shape)

    def write(self, path: Path, release: Callable[[], None]) -> None:
        """Write the file at `path`; what comes after may work while the disk still does.

        Calls `release` now and then, so that mapped input does not pile up. Raises OSError, and
        BuildError for a value that float16 cannot hold.
        """
        unreleased = 0
        bar = tqdm(
            total=sum(w.nbytes for w in self._weights),
            desc="export weights",
            unit="B",
            unit_scale=True,
            disable=None,
        )
        with path.open("wb") as file, bar:
            for weight in self._weights:
                file.seek(weight.offset)
                for chunk in _chunks(weight):
                    file.write(chunk)
                    bar.update(chunk.nbytes)
                    unreleased += chunk.nbytes
                    if unreleased >= _RELEASE_BYTES:
                        release()
                        unreleased = 0
            release()


def _chunks(weight: _Weight) -> Iterator[memoryview]:
    """Yield a weight's bytes; raises ValueError if its blocks do not fill its shape exactly."""
    written = 0
    if weight.dtype == UINT4:
        chunks = packed(_pieces(weight))
    else:
        chunks = (narrowed(weight.name, piece, weight.dtype) for piece in _pieces(weight))
    for chunk in chunks:
        written += chunk.nbytes
        yield chunk.view(np.uint8).data
    if written != weight.nbytes:
        raise ValueError(f"{weight.name}: blocks hold {written} bytes of {weight.nbytes}")


def _pieces(weight: _Weight) -> Iterator[NDArray[Any]]:
    """Yield the elements of a weight's blocks in pieces of bounded size."""
    limit = _CHUNK_BYTES // weight.dtype.itemsize
    for block in weight.blocks:
        flat = block.reshape(-1)
        for start in range(0, flat.size, limit):
            yield flat[start : start + limit]


def packed(pieces: Iterable[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
    """Pack codes, two a byte, across the ends of `pieces`; an odd last one gets 0 beside it."""
    left = np.empty(0, np.uint8)
    for piece in pieces:
        codes = np.concatenate([left, piece]) if left.size else piece
        even = codes.size & ~1
        left = codes[even:]
        yield pack_nibbles(codes[:even])
    if left.size:
        yield left


def narrowed(name: str, values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return `values` [n] in C order as `dtype`; raises BuildError if float16 cannot hold one."""
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(values, dtype=dtype)
    if dtype == np.float16 and array.size and int((array.view(np.uint16) & 0x7FFF).max()) >= 0x7C00:
        raise BuildError(
            f"{name}: a weight is beyond the range of fp16 (65504); "
            "build with PRECISION=bf16 or fp32"
        )
    return array


def interleave_rows(first: NDArray[Any], second: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield the rows of two [F, D] arrays in turn: first 0, second 0, first 1, second 1.

    Blocks [n, 2, D] are copies of bounded size.
    """
    row_bytes = 2 * first.shape[1] * first.itemsize
    step = max(1, _CHUNK_BYTES // max(1, row_bytes))
    for start in range(0, len(first), step):
        rows = slice(start, start + step)
        yield np.stack([first[rows], second[rows]], axis=1)
