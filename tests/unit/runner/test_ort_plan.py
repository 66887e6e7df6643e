from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton.request import RequestKey
from deepseek_triton.runner.base import StepRow
from deepseek_triton.runner.ort_plan import GPU_COSTS, CallCosts, Piece, plan_calls


def row(length: int, context_len: int = 0) -> StepRow:
    nothing = np.zeros(0, np.int32)
    return StepRow(RequestKey("r"), np.zeros(length, np.int32), context_len, nothing, None)


def rows_of(calls: list[tuple[Piece, ...]]) -> list[set[int]]:
    return [{piece.row for piece in call} for call in calls]


def test_decodes_share_one_call() -> None:
    calls = plan_calls([row(1, 10 * i) for i in range(16)], num_heads=16)
    assert rows_of(calls) == [set(range(16))]


def test_a_long_prompt_runs_apart_from_decodes() -> None:
    calls = plan_calls([row(1, 100), row(300), row(1, 90)], num_heads=16)
    assert rows_of(calls) == [{1}, {0, 2}]


def test_short_prompts_of_similar_length_share_a_call() -> None:
    assert rows_of(plan_calls([row(9), row(12), row(10)], num_heads=16)) == [{0, 1, 2}]


def test_one_long_context_does_not_make_short_ones_read_as_much() -> None:
    calls = plan_calls([row(1, 50), row(1, 30_000), row(1, 60)], num_heads=16)
    assert rows_of(calls) == [{1}, {0, 2}]


def test_a_gpu_reads_its_weights_once_for_unlike_decodes() -> None:
    rows = [row(1, 50), row(1, 30_000), row(1, 60)]
    assert rows_of(plan_calls(rows, num_heads=16, costs=GPU_COSTS)) == [{0, 1, 2}]
    rows = [row(1, 300_000), *[row(1, 50)] * 8]  # nine times as many keys cost more than that
    assert rows_of(plan_calls(rows, num_heads=16, costs=GPU_COSTS)) == [{0}, set(range(1, 9))]


def test_a_row_with_too_many_scores_is_cut() -> None:
    calls = plan_calls([row(100, 50)], num_heads=2, costs=CallCosts(8.0, 2 * 25 * 100))
    pieces = [piece for call in calls for piece in call]
    assert len(pieces) > 1
    assert all(p.length * p.num_keys <= 2500 for p in pieces)


LENGTHS = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 3000)), min_size=1, max_size=20)


@given(LENGTHS, st.integers(1, 1 << 20))
def test_every_token_runs_once_in_order_and_within_the_limit(
    shapes: list[tuple[int, int]], max_scores: int
) -> None:
    rows = [row(length, context) for length, context in shapes]
    calls = plan_calls(rows, num_heads=4, costs=CallCosts(8.0, max_scores))
    done = [0] * len(rows)
    for call in calls:
        assert len({p.row for p in call}) == len(call)
        longest, keys = call[0].length, max(p.num_keys for p in call)
        assert all(p.length <= longest for p in call)
        alone = len(call) == 1 and longest == 1
        assert alone or len(call) * longest * keys <= max(max_scores // 4, keys)
        for piece in call:
            assert piece.start == done[piece.row]
            assert piece.context_len == rows[piece.row].context_len + piece.start
            done[piece.row] += piece.length
    assert done == [length for length, _ in shapes]
