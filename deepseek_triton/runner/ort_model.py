"""One model file in ONNX Runtime on the CPU, with its KV pools written in place.

The engine directory's models (build/onnxruntime.py) have these inputs; T = B · S:

    input_ids     int32 [B, S]
    positions     int32 [B, S]        −1 = padding
    block_tables  int32 [B, M]
    slot_mapping  int64 [T, 2]        (block, offset) that receives each token's KV row
    logit_rows    int64 [R]           indices into T of the tokens whose logits are wanted
    <p>_pool.<l>  float [N, bs, W]    and <p>_pool_out.<l>, the same buffer; p = kv, or k and v
    hidden        float [T, D]        of a draft model alone (export/mtp.py)

and the outputs `logits` float [R, V] and `squared_norms` float [T, 1] (export/portable.py), which a
draft model does not have; with a draft beside it, the model also gives `hidden` [T, D].

Nothing of one row reaches another through the cache: padding tokens write to a scratch block that
is never read, block tables are padded with blocks of the same row, and a block is zeroed beyond
the written part when a call begins it, so that what its last owner left, NaN included, is gone.
Nor do shapes reach a row: its logits are the same to the last bit alone or in company, in one chunk
or in many (build/ort_functions.py and ort_shapes.py say how).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from deepseek_triton.kv_cache.spec import KVCacheSpec
from deepseek_triton.runner.ort_plan import CPU_COSTS, CallCosts, Piece, plan_calls
from deepseek_triton.runner.ort_shapes import AttentionShape

HIDDEN, SQUARED_NORMS = "hidden", "squared_norms"


@dataclass(frozen=True)
class ModelRow:
    """One request's share of a call of a model."""

    token_ids: NDArray[np.int32]  # [n ≥ 1]
    context_len: int  # tokens in the cache before the first one
    block_table: NDArray[np.int32]  # [m]
    num_logits: int  # how many of the last tokens have their logits computed
    hidden: NDArray[np.float32] | None = None  # [n, D] for a draft model


@dataclass(frozen=True)
class ModelShape:
    """Sizes that a call needs to know."""

    vocab_size: int
    hidden_size: int
    attention: AttentionShape


@dataclass(frozen=True)
class ModelOutputs:
    """What a step of the model gave."""

    logits: NDArray[np.float32]  # [R, V], a view that the next call overwrites
    places: list[list[int]]  # of each row in `logits`, in the order of its tokens
    hidden: list[NDArray[np.float32]]  # [n, D] of each row, if the model gives them
    overflowed: tuple[int, ...]  # rows: see overflowed_rows


Call = tuple[tuple[Piece, ...], list[int]]
"""Pieces of the rows of a step, the longest first, and the tokens [R] whose logits are wanted."""


def calls_of(
    rows: Sequence[ModelRow], *, num_heads: int, costs: CallCosts
) -> tuple[list[Call], list[list[int]]]:
    """Return the calls of a step, and for each row where its logits are among those of all calls.

    A call's token t of row i in the padded [B, S] has the number i · S + t.
    """
    places: list[list[int]] = [[] for _ in rows]
    calls: list[Call] = []
    begin = 0
    for pieces in plan_calls(rows, num_heads=num_heads, costs=costs):
        length = pieces[0].length  # the planner puts the longest first
        logit_rows: list[int] = []
        for i, piece in enumerate(pieces):
            first = len(rows[piece.row].token_ids) - rows[piece.row].num_logits - piece.start
            tokens = range(max(first, 0), piece.length)
            place = begin + len(logit_rows)
            places[piece.row] += range(place, place + len(tokens))
            logit_rows += [i * length + token for token in tokens]
        calls.append((pieces, logit_rows))
        begin += len(logit_rows)
    return calls, places


def step_inputs(
    rows: Sequence[ModelRow],
    pieces: Sequence[Piece],
    spec: KVCacheSpec,
    *,
    batch: int,
    num_keys: int,
    scratch: int,
) -> dict[str, NDArray[np.generic]]:
    """Return input_ids, positions, block_tables and slot_mapping of a call of `batch` rows.

    There are `batch` − len(pieces) copies of the first piece, which write into the block `scratch`,
    as padding does; block tables hold `num_keys` tokens.
    """
    block_size, count = spec.block_size, len(pieces)
    length = pieces[0].length
    input_ids = np.zeros((batch, length), np.int32)
    tables = np.empty((batch, spec.blocks_for(num_keys)), np.int32)
    for i, piece in enumerate(pieces):
        row = rows[piece.row]
        input_ids[i, : piece.length] = row.token_ids[piece.start : piece.start + piece.length]
        used = spec.blocks_for(piece.num_keys)
        tables[i, :used] = row.block_table[:used]
        tables[i, used:] = row.block_table[0]
    input_ids[count:], tables[count:] = input_ids[0], tables[0]
    copied = [*pieces, *[pieces[0]] * (batch - count)]
    lengths = np.array([p.length for p in copied])[:, None]
    context_lens = np.array([p.context_len for p in copied])[:, None]
    offsets = np.arange(length)
    positions = np.where(offsets < lengths, context_lens + offsets, -1)
    written = (positions >= 0) & (np.arange(batch) < count)[:, None]
    blocks = np.take_along_axis(tables, np.maximum(positions, 0) // block_size, axis=1)
    blocks = np.where(written, blocks, scratch)
    slots = np.stack([blocks, positions % block_size], axis=-1).reshape(-1, 2)
    return {
        "input_ids": input_ids,
        "positions": positions.astype(np.int32),
        "block_tables": tables,
        "slot_mapping": slots.astype(np.int64),
    }


def begun_blocks(
    spec: KVCacheSpec, rows: Sequence[ModelRow], pieces: Sequence[Piece]
) -> list[tuple[int, int]]:
    """Return each block that a piece begins and does not fill, with how many slots it fills."""
    begun = []
    for piece in pieces:
        last, used = divmod(piece.num_keys, spec.block_size)
        if used and last * spec.block_size >= piece.context_len:
            begun.append((int(rows[piece.row].block_table[last]), used))
    return begun


def overflowed_rows(
    rows: Sequence[ModelRow], pieces: Sequence[Piece], squared_norms: NDArray[np.float32]
) -> Iterator[int]:
    """Yield the row of each piece with a token whose `squared_norms` [B, S] are not finite.

    Tokens whose logits are wanted are left out, so that a draft which will not be accepted harms
    nobody: their logits show it.
    """
    for piece, norms in zip(pieces, squared_norms, strict=False):
        row = rows[piece.row]
        unseen = min(len(row.token_ids) - row.num_logits - piece.start, piece.length)
        if unseen > 0 and not np.isfinite(norms[:unseen]).all():
            yield piece.row


class PagedModel:
    """A session and the pools that it writes. Not thread-safe."""

    def __init__(
        self,
        session: ort.InferenceSession,
        shape: ModelShape,
        spec: KVCacheSpec,
        pools: dict[str, NDArray[np.float32]],
        *,
        num_threads: int,
    ) -> None:
        """`pools` [num_blocks + 1, block_size, width] by input name; the last block is scratch."""
        self._session: ort.InferenceSession | None = session
        self._shape, self._spec = shape, spec
        self._num_threads = num_threads
        self._pools = list(pools.values())
        self._scratch = len(self._pools[0]) - 1
        self._binding = session.io_binding()
        self._values = [ort.OrtValue.ortvalue_from_numpy(pool) for pool in self._pools]
        for name, value in zip(pools, self._values, strict=True):
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(name.replace("_pool.", "_pool_out."), value)
        given = {output.name for output in session.get_outputs()}
        widths = {HIDDEN: shape.hidden_size, SQUARED_NORMS: 1}
        self._widths = {name: width for name, width in widths.items() if name in given}
        self._logits: NDArray[np.float32] = np.empty((0, shape.vocab_size), np.float32)

    def forward(self, rows: Sequence[ModelRow]) -> ModelOutputs:
        """Run the model; mutates the pools."""
        wanted = sum(row.num_logits for row in rows)
        if wanted > len(self._logits):
            self._logits = np.empty((wanted, self._shape.vocab_size), np.float32)
        hidden: list[NDArray[np.float32]] = []
        if HIDDEN in self._widths:
            sizes = [(len(row.token_ids), self._shape.hidden_size) for row in rows]
            hidden = [np.empty(size, np.float32) for size in sizes]
        num_heads = self._shape.attention.num_heads
        calls, places = calls_of(rows, num_heads=num_heads, costs=CPU_COSTS)
        overflowed: set[int] = set()
        begin = 0
        for pieces, logit_rows in calls:
            end = begin + len(logit_rows)
            given = self._call(rows, pieces, logit_rows, self._logits[begin:end])
            if HIDDEN in given:
                for piece, states in zip(pieces, given[HIDDEN], strict=False):
                    stop = piece.start + piece.length
                    hidden[piece.row][piece.start : stop] = states[: piece.length]
            if SQUARED_NORMS in given:
                overflowed.update(overflowed_rows(rows, pieces, given[SQUARED_NORMS]))
            begin = end
        return ModelOutputs(self._logits[:begin], places, hidden, tuple(sorted(overflowed)))

    def close(self) -> None:
        """Free the session and the pools; idempotent."""
        self._session = None
        self._binding = None
        self._values, self._pools = [], []

    def _call(
        self,
        rows: Sequence[ModelRow],
        pieces: tuple[Piece, ...],
        logit_rows: list[int],
        logits: NDArray[np.float32],
    ) -> dict[str, NDArray[np.float32]]:
        """Run one call; write `logits` [R, V]; return the outputs [B, S, …] that the model has."""
        if self._session is None:
            raise RuntimeError("the runner is closed")
        self._clear_new_tails(rows, pieces)
        inputs = self._inputs(rows, pieces)
        inputs["logit_rows"] = np.array(logit_rows, np.int64)
        for name, array in inputs.items():
            self._binding.bind_cpu_input(name, array)
        binding, real = self._binding, np.float32
        binding.bind_output("logits", "cpu", 0, real, logits.shape, logits.ctypes.data)
        batch, length = inputs["input_ids"].shape
        given = {}
        for name, width in self._widths.items():
            array = given[name] = np.empty((batch, length, width), real)
            shape = (batch * length, width)
            binding.bind_output(name, "cpu", 0, real, shape, array.ctypes.data)
        self._session.run_with_iobinding(binding)
        return given

    def _inputs(
        self, rows: Sequence[ModelRow], pieces: tuple[Piece, ...]
    ) -> dict[str, NDArray[np.generic]]:
        length = pieces[0].length
        attention, num_threads = self._shape.attention, self._num_threads
        batch = attention.padded_batch(len(pieces), length, num_threads)
        num_keys = max(attention.least_keys(batch, num_threads), *(p.num_keys for p in pieces))
        inputs = step_inputs(
            rows, pieces, self._spec, batch=batch, num_keys=num_keys, scratch=self._scratch
        )
        if rows[0].hidden is not None:
            copied = [*pieces, *pieces[:1] * (batch - len(pieces))]
            inputs["hidden"] = self._hidden(rows, copied, batch, length)
        return inputs

    def _hidden(
        self, rows: Sequence[ModelRow], pieces: Sequence[Piece], batch: int, length: int
    ) -> NDArray[np.generic]:
        padded = np.zeros((batch, length, self._shape.hidden_size), np.float32)
        for i, piece in enumerate(pieces):
            given = rows[piece.row].hidden
            if given is not None:
                padded[i, : piece.length] = given[piece.start : piece.start + piece.length]
        return padded.reshape(batch * length, -1)

    def _clear_new_tails(self, rows: Sequence[ModelRow], pieces: Sequence[Piece]) -> None:
        """Zero each block that a piece begins and does not fill."""
        begun = [block for block, _ in begun_blocks(self._spec, rows, pieces)]
        if begun:
            for pool in self._pools:
                pool[begun] = 0
