from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton.build.limits import CallLimits
from deepseek_triton.request import RequestKey
from deepseek_triton.runner.base import StepRow
from deepseek_triton.runner.tensorrt_calls import DECODE, PREFILL, Call, CallPlanner, CallShape

BLOCK, NUM_BLOCKS = 16, 1000
LIMITS = CallLimits(max_batch_size=6, max_prefill_rows=3, max_chunk_len=50, max_context_len=400)
PLANNER = CallPlanner(LIMITS, BLOCK)


def row(context_len: int, tokens: int, first_block: int = 0) -> StepRow:
    blocks = -(-(context_len + tokens) // BLOCK)
    return StepRow(
        RequestKey("r"),
        np.arange(context_len, context_len + tokens, dtype=np.int32),
        context_len,
        np.arange(first_block, first_block + blocks, dtype=np.int32)[::-1].copy(),
        None,
    )


def arrays(call: Call, rows: list[StepRow]) -> dict[str, np.ndarray]:
    buffer = np.full(call.shape.size, 12345, np.int32)
    PLANNER.fill(call, rows, buffer, NUM_BLOCKS)
    return {
        name: buffer[offset : offset + int(np.prod(shape))].reshape(shape)
        for name, (offset, shape) in call.shape.layout().items()
    }


@st.composite
def steps(draw: st.DrawFn) -> list[StepRow]:
    sizes = draw(st.lists(st.tuples(st.integers(0, 280), st.integers(1, 120)), max_size=12))
    return [row(context, tokens, 30 * i) for i, (context, tokens) in enumerate(sizes)]


@settings(max_examples=60, deadline=None)
@given(steps())
def test_every_token_runs_once_in_order_within_the_limits(rows: list[StepRow]) -> None:
    done = [0] * len(rows)
    for call in PLANNER.plan(rows):
        shape, largest = call.shape, PLANNER.largest()[call.shape.profile]
        assert len(call.pieces) <= shape.batch <= largest.batch
        assert shape.length <= largest.length and shape.table_width <= largest.table_width
        assert len({piece.row for piece in call.pieces}) == len(call.pieces)
        filled = arrays(call, rows)
        for i, piece in enumerate(call.pieces):
            one = rows[piece.row]
            assert piece.start == done[piece.row]
            assert piece.context_len == one.context_len + piece.start
            done[piece.row] += piece.length
            assert piece.is_last == (done[piece.row] == len(one.token_ids))
            ids = filled["input_ids"][i, : piece.length]
            assert ids.tolist() == one.token_ids[piece.start :][: piece.length].tolist()
    assert done == [len(one.token_ids) for one in rows]


@settings(max_examples=60, deadline=None)
@given(steps())
def test_a_call_writes_what_its_tokens_own_and_reads_only_what_was_written(
    rows: list[StepRow],
) -> None:
    """Slots that hold something, by a model of the pool: True once written or zeroed."""
    ready = np.zeros((NUM_BLOCKS + 1) * BLOCK, bool)
    ready[NUM_BLOCKS * BLOCK :] = True
    for one in rows:  # what earlier steps wrote, and zeroed behind it
        cached = one.block_table[: -(-one.context_len // BLOCK)]
        for block in cached:
            ready[block * BLOCK : (block + 1) * BLOCK] = True
    for call in PLANNER.plan(rows):
        filled = arrays(call, rows)
        for i, table in enumerate(filled["block_tables"]):
            assert ready.reshape(-1, BLOCK)[table].all()
            read = filled["context_lens"][i]
            assert read <= call.shape.table_width * BLOCK
        slots, tails = filled["slots"].reshape(-1), filled["tails"].reshape(-1)
        owned = slots[slots >= 0]
        assert len(set(owned.tolist())) == len(owned) == sum(p.length for p in call.pieces)
        ready[owned] = True
        for slot, tail in zip(slots, tails, strict=True):
            if slot >= 0:
                assert slot % BLOCK + tail < BLOCK
                ready[slot + 1 : slot + 1 + tail] = True
            else:
                assert tail == 0


def test_arrays_of_a_prefill_call() -> None:
    rows = [row(20, 9, first_block=3)]
    (call,) = PLANNER.plan(rows)
    assert call.shape == CallShape(PREFILL, 1, 14, 2)  # lengths grow by 7, tables by powers of two
    filled = arrays(call, rows)
    assert filled["input_ids"].tolist() == [[*range(20, 29), *[0] * 5]]
    assert filled["positions"].tolist() == [[*range(20, 29), *[-1] * 5]]
    assert (filled["context_lens"].tolist(), filled["last_token"].tolist()) == ([20], [8])
    assert filled["block_tables"].tolist() == [[4, 3]]
    assert filled["slots"].tolist() == [[*range(3 * 16 + 4, 3 * 16 + 13), *[-1] * 5]]
    assert filled["tails"].tolist() == [[0] * 14]  # block 3 was begun by an earlier step


def test_arrays_of_a_decode_call_with_padding_rows() -> None:
    rows = [row(32, 1, 10), row(5, 1, 20), row(100, 1, 30)]
    (call,) = PLANNER.plan(rows)
    assert call.shape == CallShape(DECODE, 4, 1, 8)
    filled = arrays(call, rows)
    assert filled["positions"].reshape(-1).tolist() == [32, 5, 100, -1]
    assert filled["context_lens"].tolist() == [32, 5, 100, 0]
    assert filled["slots"].reshape(-1).tolist() == [160, 325, 484, -1]
    assert filled["tails"].reshape(-1).tolist() == [15, 0, 0, 0]
    assert filled["block_tables"][0].tolist() == [12, 11, *[NUM_BLOCKS] * 6]
    assert filled["block_tables"][3].tolist() == [NUM_BLOCKS] * 8


def test_short_prompts_do_not_pay_for_a_long_one() -> None:
    calls = PLANNER.plan([row(0, 5), row(0, 50), row(0, 30), row(0, 4)])
    assert [[p.length for p in call.pieces] for call in calls] == [[50, 30], [5, 4]]


@pytest.mark.parametrize("profile", [PREFILL, DECODE])
def test_addresses_are_aligned_for_tensorrt(profile: int) -> None:
    for batch in range(1, 4):
        shape = CallShape(profile, batch, 1 if profile == DECODE else 33, 5)
        places = sorted((offset, int(np.prod(s))) for offset, s in shape.layout().values())
        assert all(offset * 4 % 256 == 0 for offset, _ in places)
        ends = [offset + size for offset, size in places]
        assert all(end <= start for end, (start, _) in zip(ends, places[1:], strict=False))
        assert ends[-1] <= shape.size <= PLANNER.largest()[profile].size


def test_there_are_few_decode_shapes() -> None:
    shapes = {
        call.shape
        for count in range(1, 7)
        for context in range(0, 399)
        for call in PLANNER.plan([row(context, 1)] * count)
    }
    assert len(shapes) == 4 * 6  # batches 1, 2, 4, 6; tables 1, 2, 4, 8, 16, 25
