from __future__ import annotations

import numpy as np
import pytest

from deepseek_triton.request import RequestKey
from deepseek_triton.runner.base import StepRow
from deepseek_triton.runner.cuda_batch import (
    DecodeArrays,
    PackedPrompts,
    RaggedRows,
    decode_size,
    prompts_size,
)

BLOCK_SIZE = 4


def row(ids: list[int], context: int, table: list[int]) -> StepRow:
    return StepRow(
        RequestKey("r"), np.array(ids, np.int32), context, np.array(table, np.int32), None
    )


def test_decode_rows_fill_a_bucket_and_the_rest_is_padding() -> None:
    arrays = DecodeArrays(np.full(decode_size(4, 3), 99, np.int32), 4, 3)
    arrays.fill([row([7], 0, [2]), row([8], 8, [5, 0, 6])], BLOCK_SIZE)
    assert arrays.token_ids.tolist() == [7, 8, 0, 0]
    assert arrays.positions.tolist() == [0, 8, -1, -1]
    assert arrays.slots.tolist() == [2 * 4, 6 * 4, -1, -1]
    assert arrays.context_lens.tolist() == [1, 9, 0, 0]
    assert arrays.block_tables[:2].tolist() == [[2, 0, 0], [5, 0, 6]]


def test_a_smaller_batch_leaves_no_row_of_a_larger_one() -> None:
    arrays = DecodeArrays(np.zeros(decode_size(2, 2), np.int32), 2, 2)
    arrays.fill([row([7], 3, [1]), row([8], 4, [2, 3])], BLOCK_SIZE)
    arrays.fill([row([9], 1, [0])], BLOCK_SIZE)
    assert arrays.slots.tolist() == [1, -1]
    assert arrays.context_lens.tolist() == [2, 0]
    assert arrays.token_ids.tolist() == [9, 0]


def test_ragged_rows_know_the_slots_of_all_their_keys() -> None:
    packed = RaggedRows([row([1, 2, 3], 3, [5, 2]), row([4], 0, [7])], BLOCK_SIZE)
    assert packed.token_ids.tolist() == [1, 2, 3, 4]
    assert packed.positions.tolist() == [3, 4, 5, 0]
    assert packed.slots.tolist() == [23, 8, 9, 28]
    assert packed.key_slots.tolist() == [20, 21, 22, 23, 8, 9, 28]
    assert packed.cu_q.tolist() == [0, 3, 4]
    assert packed.cu_k.tolist() == [0, 6, 7]
    assert packed.logit_rows.tolist() == [2, 3]


def test_rows_without_context_need_no_key_slots() -> None:
    packed = RaggedRows([row([1, 2], 0, [5])], BLOCK_SIZE)
    assert not packed.has_context
    assert packed.key_slots.size == 0


def test_prompts_fill_a_bucket_and_the_rest_is_padding() -> None:
    arrays = PackedPrompts(np.zeros(prompts_size(8, 3), np.int32), 8, 3)
    arrays.fill([row([1, 2, 3, 4, 5], 0, [1, 4]), row([6, 7], 0, [2])], BLOCK_SIZE)
    arrays.fill([row([1, 2, 3], 0, [1]), row([6], 0, [2])], BLOCK_SIZE)
    assert arrays.token_ids.tolist() == [1, 2, 3, 6, 0, 0, 0, 0]
    assert arrays.positions.tolist() == [0, 1, 2, 0, -1, -1, -1, -1]
    assert arrays.slots.tolist() == [4, 5, 6, 8, -1, -1, -1, -1]
    assert arrays.cu_lens.tolist() == [0, 3, 4, 4]
    assert arrays.logit_rows.tolist() == [2, 3, 0]


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (3, 2), (5, 4), (18, 7), (64, 3)])
def test_what_travels_in_one_copy_is_aligned_as_in_the_warm_up(tokens: int, rows: int) -> None:
    """Kernels are compiled once more for pointers that 16 does not divide: no request may wait."""
    torch = pytest.importorskip("torch")
    from deepseek_triton.runner.cuda_step import packed_step

    table = list(range(1 + 2 * tokens // BLOCK_SIZE))
    batch = [row(list(range(tokens + i)), i, table) for i in range(rows)]
    step = packed_step(batch, {"pool": torch.zeros(99, BLOCK_SIZE, 1)}, torch.device("cpu"))
    attention = step.attention
    parts = [step.input_ids, step.positions, step.slots, attention.cu_q, attention.cu_k]
    assert {(part.data_ptr() - parts[0].data_ptr()) % 16 for part in parts} == {0}
    packed = RaggedRows(batch, BLOCK_SIZE)
    assert step.input_ids.tolist() == packed.token_ids.tolist()
    assert step.positions.tolist() == packed.positions.tolist()
    assert step.slots.tolist() == packed.slots.tolist()
    assert attention.cu_q.tolist() == packed.cu_q.tolist()
    assert attention.cu_k.tolist() == packed.cu_k.tolist()
    assert step.logit_rows.tolist() == packed.logit_rows.tolist()
    if packed.has_context:
        assert attention.key_slots.tolist() == packed.key_slots.tolist()
