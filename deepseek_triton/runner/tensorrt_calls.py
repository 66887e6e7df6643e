"""How the rows of a step become calls of a TensorRT engine: padded, of few different shapes.

The engine has two profiles: `prefill`, a few rows of up to a chunk of tokens, and `decode`, many
rows of one token. Shapes are rounded up: TensorRT prepares itself anew for each shape that it has
not seen, and each shape of a decode call has a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.build.limits import CallLimits
from deepseek_triton.runner.base import StepRow

PREFILL, DECODE = 0, 1
"""Indices of the optimization profiles."""

_CHUNK_STEPS = 8  # different lengths of a prefill call
_ALIGNED = 64  # int32 elements: TensorRT wants addresses of 256 bytes
_SHORTEST = 2  # a row joins a longer one when it has at least 1/2 of its tokens

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class CallShape:
    """What a call's arrays measure, padding included."""

    profile: int
    batch: int
    length: int  # tokens of a row; 1 when decoding
    table_width: int  # blocks

    @property
    def num_tokens(self) -> int:
        """Tokens, padding included."""
        return self.batch * self.length

    def layout(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return offset (in int32 elements) and shape of each array in the buffer of a call.

        The first five are inputs of the engine; slots and tails are read by the write of the rows.
        """
        tokens = (self.batch, self.length)
        shapes: dict[str, tuple[int, ...]] = {
            "input_ids": tokens,
            "positions": tokens,
            "context_lens": (self.batch,),
            "last_token": (self.batch,),
            "block_tables": (self.batch, self.table_width),
            "slots": tokens,
            "tails": tokens,
        }
        places, offset = {}, 0
        for name, shape in shapes.items():
            places[name] = (offset, shape)
            offset += -(-int(np.prod(shape)) // _ALIGNED) * _ALIGNED
        return places

    @property
    def size(self) -> int:
        """Elements of the buffer of a call."""
        offset, shape = self.layout()["tails"]
        return offset + -(-int(np.prod(shape)) // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one row that run in one call."""

    row: int  # index in the step
    start: int  # index of the first token in the row's token_ids
    length: int  # tokens
    context_len: int  # tokens in the cache before the first one
    is_last: bool  # holds the row's last token

    @property
    def num_keys(self) -> int:
        """Tokens that the piece's last token attends to, itself included."""
        return self.context_len + self.length


@dataclass(frozen=True)
class Call:
    """Pieces of rows that run together, the first rows of the arrays."""

    shape: CallShape
    pieces: tuple[Piece, ...]


class CallPlanner:
    """Cuts the rows of a step into calls that an engine of `limits` runs."""

    def __init__(self, limits: CallLimits, block_size: int) -> None:
        self._limits = limits
        self._block_size = block_size
        self._max_table = -(-limits.max_context_len // block_size)
        self._chunk_step = -(-limits.max_chunk_len // _CHUNK_STEPS)

    def largest(self) -> tuple[CallShape, CallShape]:
        """Return the largest shape of each profile: prefill, decode."""
        limits = self._limits
        return (
            CallShape(PREFILL, limits.max_prefill_rows, limits.max_chunk_len, self._max_table),
            CallShape(DECODE, limits.max_batch_size, 1, self._max_table),
        )

    def plan(self, rows: Sequence[StepRow]) -> list[Call]:
        """Return the calls of a step in order; the pieces of a row are in different calls."""
        calls: list[Call] = []
        pending = [self._pieces(index, row) for index, row in enumerate(rows)]
        while heads := [piece for pieces in pending if (piece := next(pieces, None))]:
            single = [piece for piece in heads if piece.length == 1]
            longer = [piece for piece in heads if piece.length > 1]
            calls += [self._call(PREFILL, group) for group in self._group(longer)]
            step = self._limits.max_batch_size
            calls += [self._call(DECODE, single[i : i + step]) for i in range(0, len(single), step)]
        return calls

    def fill(self, call: Call, rows: Sequence[StepRow], buffer: Ints, num_blocks: int) -> None:
        """Write the arrays of `call` into `buffer`, laid out as its shape says.

        Padding has token 0, position and slot −1. Tables hold the blocks that are in the cache by
        now, then `num_blocks`, a block that stays zero: so a row reads nothing of another. `tails`
        counts the slots after a token that are to be zeroed: a block that a row begins is cleared
        of what its last owner left.
        """
        views = {
            name: buffer[offset : offset + int(np.prod(shape))].reshape(shape)
            for name, (offset, shape) in call.shape.layout().items()
        }
        padding = {"positions": -1, "slots": -1, "block_tables": num_blocks}
        for name, view in views.items():
            view[...] = padding.get(name, 0)
        for i, piece in enumerate(call.pieces):
            row, cached = rows[piece.row], -(-piece.context_len // self._block_size)
            length, end = piece.length, piece.start + piece.length
            views["input_ids"][i, :length] = row.token_ids[piece.start : end]
            views["context_lens"][i] = piece.context_len
            views["last_token"][i] = length - 1
            views["block_tables"][i, :cached] = row.block_table[:cached]
            positions = np.arange(piece.context_len, piece.num_keys)
            views["positions"][i, :length] = positions
            blocks = row.block_table[positions // self._block_size]
            views["slots"][i, :length] = blocks * self._block_size + positions % self._block_size
            begun = (piece.num_keys - 1) // self._block_size * self._block_size
            if begun >= piece.context_len:
                views["tails"][i, length - 1] = begun + self._block_size - piece.num_keys

    def _pieces(self, index: int, row: StepRow) -> Iterator[Piece]:
        start, total = 0, len(row.token_ids)
        while start < total:
            length = min(total - start, self._limits.max_chunk_len)
            yield Piece(index, start, length, row.context_len + start, start + length == total)
            start += length

    def _group(self, pieces: list[Piece]) -> list[list[Piece]]:
        """Group pieces of similar length, the longest of each group first."""
        groups: list[list[Piece]] = []
        for piece in sorted(pieces, key=lambda p: -p.length):
            if (
                groups
                and len(groups[-1]) < self._limits.max_prefill_rows
                and piece.length * _SHORTEST >= groups[-1][0].length
            ):
                groups[-1].append(piece)
            else:
                groups.append([piece])
        return groups

    def _call(self, profile: int, pieces: list[Piece]) -> Call:
        cached = max(-(-piece.context_len // self._block_size) for piece in pieces)
        width = min(_power_of_two(max(cached, 1)), self._max_table)
        if profile == DECODE:
            batch = min(_power_of_two(len(pieces)), self._limits.max_batch_size)
            return Call(CallShape(DECODE, batch, 1, width), tuple(pieces))
        longest = -(-pieces[0].length // self._chunk_step) * self._chunk_step
        length = min(longest, self._limits.max_chunk_len)
        return Call(CallShape(PREFILL, len(pieces), length, width), tuple(pieces))


def _power_of_two(number: int) -> int:
    """Return the least power of two that is at least `number` ≥ 1."""
    return 1 << (number - 1).bit_length()
