"""The rows of a step as int32 arrays in one host buffer, which the device gets in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.runner.base import StepRow

Ints = NDArray[np.int32]


class DecodeArrays:
    """Views [B], and [B, M] for the block tables, on one buffer; B and M never change.

    Rows that are not filled are padding: no keys, position and slot −1, token 0.
    """

    def __init__(self, buffer: Ints, batch: int, blocks: int) -> None:
        """`buffer` holds `decode_size(batch, blocks)` numbers."""
        header = buffer[: 4 * batch].reshape(4, batch)
        self.token_ids, self.positions, self.slots, self.context_lens = header
        self.block_tables = buffer[4 * batch :].reshape(batch, blocks)
        self._tables: list[Ints | None] = [None] * batch  # what each row was copied from
        self.token_ids[:], self.positions[:], self.slots[:] = 0, -1, -1
        self.context_lens[:], self.block_tables[:] = 0, 0

    def fill(self, rows: Sequence[StepRow], block_size: int) -> None:
        """Take rows of one token each, the rest being padding.

        Table entries beyond a row's blocks keep what an earlier step left: valid blocks.
        """
        count = len(rows)
        self.token_ids[:count] = [row.token_ids[0] for row in rows]
        positions = np.array([row.context_len for row in rows], np.int32)
        for i, row in enumerate(rows):
            if row.block_table is not self._tables[i]:  # the same object until it changes
                table = row.block_table[: self.block_tables.shape[1]]
                self.block_tables[i, : len(table)] = table
                self._tables[i] = row.block_table
        blocks = self.block_tables[np.arange(count), positions // block_size]
        self.positions[:count] = positions
        self.slots[:count] = blocks * block_size + positions % block_size
        self.context_lens[:count] = positions + 1
        self.token_ids[count:], self.positions[count:], self.slots[count:] = 0, -1, -1
        self.context_lens[count:] = 0


def decode_size(batch: int, blocks: int) -> int:
    """Numbers in the buffer of DecodeArrays."""
    return batch * (4 + blocks)


class PackedPrompts:
    """Views [T] of ids, positions and slots, and of `rows` row ends, on one buffer.

    Tokens that are not filled are padding. Rows that are not filled have no tokens, and the first
    token stands for their last.
    """

    def __init__(self, buffer: Ints, tokens: int, rows: int) -> None:
        """`buffer` holds `prompts_size(tokens, rows)` numbers."""
        self.token_ids, self.positions, self.slots = buffer[: 3 * tokens].reshape(3, tokens)
        self.cu_lens = buffer[3 * tokens : 3 * tokens + rows + 1]
        self.logit_rows = buffer[3 * tokens + rows + 1 :]
        self.positions[:], self.slots[:] = -1, -1

    def fill(self, rows: Sequence[StepRow], block_size: int) -> None:
        """Take whole prompts: rows without cached tokens."""
        packed = RaggedRows(rows, block_size)
        total, count = len(packed.token_ids), len(rows)
        self.token_ids[:total], self.token_ids[total:] = packed.token_ids, 0
        self.positions[:total], self.positions[total:] = packed.positions, -1
        self.slots[:total], self.slots[total:] = packed.slots, -1
        self.cu_lens[: count + 1], self.cu_lens[count + 1 :] = packed.cu_q, total
        self.logit_rows[:count], self.logit_rows[count:] = packed.logit_rows, 0


def prompts_size(tokens: int, rows: int) -> int:
    """Numbers in the buffer of PackedPrompts."""
    return 3 * tokens + 2 * rows + 1


class RaggedRows:
    """Rows of any lengths packed one after another: T tokens and K keys in all."""

    def __init__(self, rows: Sequence[StepRow], block_size: int) -> None:
        self.q_lens = tuple(len(row.token_ids) for row in rows)
        self.k_lens = tuple(row.context_len + len(row.token_ids) for row in rows)
        self.token_ids = np.concatenate([row.token_ids for row in rows])
        keys = [_slots(row, block_size) for row in rows]
        self.slots = np.concatenate(
            [slots[row.context_len :] for row, slots in zip(rows, keys, strict=True)]
        )
        self.has_context = any(row.context_len for row in rows)
        self.key_slots = np.concatenate(keys) if self.has_context else np.empty(0, np.int32)
        self.positions = np.concatenate(
            [np.arange(row.context_len, k) for row, k in zip(rows, self.k_lens, strict=True)]
        )
        self.cu_q, self.cu_k = _running_sum(self.q_lens), _running_sum(self.k_lens)
        self.logit_rows = self.cu_q[1:] - 1  # each row's last token

    def parts(self) -> list[NDArray[np.int32] | NDArray[np.int64]]:
        """Return what travels to the device, in this order."""
        return [
            *(self.token_ids, self.positions, self.slots),
            *(self.cu_q, self.cu_k, self.logit_rows, self.key_slots),
        ]


def _slots(row: StepRow, block_size: int) -> NDArray[np.int64]:
    """Return the pool slots of a row's cached and new tokens."""
    positions = np.arange(row.context_len + len(row.token_ids))
    blocks = row.block_table[positions // block_size].astype(np.int64)
    slots: NDArray[np.int64] = blocks * block_size + positions % block_size
    return slots


def _running_sum(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
