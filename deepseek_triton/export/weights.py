"""Weights on their way from checkpoint views to one external data file.

A weight is declared with its shape and a lazy sequence of blocks; nothing is read before
`WeightFile.write`. One thread writes, the others read and convert a few pieces ahead of it.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from tqdm import tqdm

from deepseek_triton.checkpoint.convert import PIECE_BYTES, narrowed
from deepseek_triton.checkpoint.reader import Block
from deepseek_triton.quantize.int4 import Int4Linear, pack_nibbles

UINT4 = np.dtype(ml_dtypes.uint4)
"""Two codes a byte in files, the first in the low half; blocks of codes are uint8, one a byte."""

ALIGNMENT = 4096  # a page, so that any runtime can map each weight by itself
_RELEASE_BYTES = 64 << 20  # written between two releases of mapped input pages
_WORKERS = min(8, os.cpu_count() or 1)  # one thread writes no faster than these convert
_AHEAD = 2 * _WORKERS  # pieces that are converted before they are written
_AHEAD_LAYERS = 1  # of INT4 codes, which are not read in pieces: few, for the memory they take

Blocks = Iterable[NDArray[Any] | Block]
"""A weight's elements in C order, as arrays or as functions that return a few MB of them each."""


class TensorReader(Protocol):
    """What export needs of a checkpoint."""

    def blocks(self, name: str, shape: tuple[int, ...]) -> Iterator[Block]:
        """Yield a tensor in blocks of rows, of the same sizes for the same shape."""

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
    blocks: Blocks
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
        blocks: Blocks,
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
        with ThreadPoolExecutor(_WORKERS) as workers:
            data = b"".join(_chunks(weight, workers))
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
        with path.open("wb") as file, bar, ThreadPoolExecutor(_WORKERS) as workers:
            for weight in self._weights:
                file.seek(weight.offset)
                for chunk in _chunks(weight, workers):
                    file.write(chunk)
                    bar.update(chunk.nbytes)
                    unreleased += chunk.nbytes
                    if unreleased >= _RELEASE_BYTES:
                        release()
                        unreleased = 0
            release()


def _chunks(weight: _Weight, workers: Executor) -> Iterator[memoryview]:
    """Yield a weight's bytes; raises ValueError if its blocks do not fill its shape exactly."""
    written = 0
    if weight.dtype == UINT4:
        codes = _in_turn(workers, (partial(array_of, b) for b in weight.blocks), _AHEAD_LAYERS)
        chunks = packed(array_of(piece) for piece in _pieces(codes, PIECE_BYTES))
    else:
        pieces = _pieces(weight.blocks, PIECE_BYTES // weight.dtype.itemsize)
        chunks = _in_turn(workers, (partial(_converted, weight, p) for p in pieces), _AHEAD)
    for chunk in chunks:
        written += chunk.nbytes
        yield chunk.view(np.uint8).data
    if written != weight.nbytes:
        raise ValueError(f"{weight.name}: blocks hold {written} bytes of {weight.nbytes}")


def _pieces(blocks: Blocks, limit: int) -> Blocks:
    """Yield arrays in flat pieces of at most `limit` elements, and functions as they are."""
    for block in blocks:
        if callable(block):
            yield block
            continue
        flat = block.reshape(-1)
        for start in range(0, flat.size, limit):
            yield flat[start : start + limit]


def _converted(weight: _Weight, piece: NDArray[Any] | Block) -> NDArray[Any]:
    values = array_of(piece).reshape(-1)
    done = values.dtype == weight.dtype and callable(piece)  # narrowed_blocks gives functions
    return np.ascontiguousarray(values) if done else narrowed(weight.name, values, weight.dtype)


def _in_turn(workers: Executor, calls: Iterable[Block], ahead: int) -> Iterator[NDArray[Any]]:
    """Yield the results of `calls` in order; at most `ahead` + 1 are under way or waiting."""
    pending: deque[Future[NDArray[Any]]] = deque()
    for call in calls:
        pending.append(workers.submit(call))
        if len(pending) > ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def array_of(block: NDArray[Any] | Block) -> NDArray[Any]:
    """Return the elements of one of Blocks."""
    return block() if callable(block) else block


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


def narrowed_blocks(source: str, blocks: Blocks, dtype: np.dtype[Any]) -> Iterator[Block]:
    """Yield `blocks` of the checkpoint's tensor `source` in `dtype`, so that errors name it."""
    for block in blocks:
        yield partial(_narrowed, source, block, dtype)


def _narrowed(source: str, block: NDArray[Any] | Block, dtype: np.dtype[Any]) -> NDArray[Any]:
    values = array_of(block)
    return narrowed(source, values.reshape(-1), dtype).reshape(values.shape)


def interleave_rows(first: Iterable[Block], second: Iterable[Block]) -> Iterator[Block]:
    """Yield the rows of two matrices [F, D] in turn: first 0, second 0, first 1, second 1.

    Both come in blocks [n, D] of the same sizes; blocks of the result are copies [n, 2, D].
    """
    for one, other in zip(first, second, strict=True):
        yield partial(_stacked, one, other)


def _stacked(first: Block, second: Block) -> NDArray[Any]:
    return np.stack([first(), second()], axis=1)
