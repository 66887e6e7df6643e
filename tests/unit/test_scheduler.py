import pytest

from deepseek_triton.config import SchedulerConfig
from deepseek_triton.errors import InvalidRequestError, OverloadedError
from deepseek_triton.kv_cache.spec import KVCacheSpec
from deepseek_triton.request import RequestKey
from deepseek_triton.scheduler import Scheduler

BLOCK_SIZE = 4


def scheduler(num_blocks=100, ahead=False, **config):
    config = {"max_batch_size": 4, "max_tokens_per_step": 8, **config}
    spec = KVCacheSpec(num_layers=1, width=1, block_size=BLOCK_SIZE)
    return Scheduler(SchedulerConfig(**config), spec, num_blocks, ahead=ahead)


def add(under_test, key, num_prompt_tokens, max_tokens=100):
    under_test.add(RequestKey(key), num_prompt_tokens, max_tokens)


def step(under_test):
    """Run one step; return {key: (context_len, num_tokens, samples)} in row order."""
    planned = under_test.schedule()
    under_test.commit(planned)
    under_test.check_integrity()
    for row in planned.rows:
        assert len(row.block_table) * BLOCK_SIZE >= row.context_len + row.num_tokens
    return {r.request_key: (r.context_len, r.num_tokens, r.samples) for r in planned.rows}


def test_a_prompt_is_prefilled_and_then_decoded():
    under_test = scheduler()
    add(under_test, "a", 5)
    assert step(under_test) == {"a": (0, 5, True)}
    assert step(under_test) == {"a": (5, 1, True)}
    assert step(under_test) == {"a": (6, 1, True)}


def test_a_long_prompt_is_prefilled_in_chunks_and_samples_only_at_its_end():
    under_test = scheduler()
    add(under_test, "a", 19)
    assert step(under_test) == {"a": (0, 8, False)}
    assert step(under_test) == {"a": (8, 8, False)}
    assert step(under_test) == {"a": (16, 3, True)}


def test_decodes_come_first_then_running_prefills_then_waiting_requests():
    under_test = scheduler()
    add(under_test, "decoding", 2)
    step(under_test)
    add(under_test, "long", 12)
    step(under_test)
    add(under_test, "new", 9)
    assert step(under_test) == {
        "decoding": (3, 1, True),
        "long": (7, 5, True),
        "new": (0, 2, False),
    }


def test_the_batch_is_formed_anew_in_every_step():
    under_test = scheduler(max_batch_size=2)
    for key in "abc":
        add(under_test, key, 2)
    assert list(step(under_test)) == ["a", "b"]
    under_test.remove(RequestKey("a"))
    assert step(under_test) == {"b": (2, 1, True), "c": (0, 2, True)}


def test_requests_start_in_order_of_arrival_even_when_a_later_one_would_fit():
    under_test = scheduler(num_blocks=6)
    add(under_test, "a", 8, max_tokens=9)
    step(under_test)
    add(under_test, "large", 16, max_tokens=2)
    add(under_test, "small", 1, max_tokens=1)
    assert list(step(under_test)) == ["a"]
    under_test.remove(RequestKey("a"))
    assert list(step(under_test)) == ["large"]


def test_the_youngest_is_preempted_and_recomputed_before_any_waiting_request():
    under_test = scheduler(num_blocks=4, max_batch_size=2)
    add(under_test, "old", 4, max_tokens=9)
    add(under_test, "young", 4, max_tokens=9)
    add(under_test, "later", 1, max_tokens=1)
    while under_test.progress(RequestKey("young")).preemptions == 0:
        step(under_test)
    young = under_test.progress(RequestKey("young"))
    assert (young.num_cached, len(young.block_table), young.running) == (0, 0, False)
    known = young.num_tokens
    assert known > 4
    while under_test.progress(RequestKey("old")).num_cached < 12:
        assert set(step(under_test)) == {"old"}
    under_test.remove(RequestKey("old"))
    planned = step(under_test)
    assert planned["young"] == (0, min(known, 8), known <= 8)
    assert list(planned)[0] == "young"


def test_a_preempted_request_starts_again_only_when_all_its_tokens_fit():
    under_test = scheduler(num_blocks=4, max_batch_size=2)
    add(under_test, "old", 4, max_tokens=9)
    add(under_test, "young", 4, max_tokens=9)
    for _ in range(12):
        step(under_test)
        if under_test.progress(RequestKey("old")).num_cached == 12:
            break
    assert under_test.num_preemptions == 1


def test_a_decode_without_blocks_takes_those_of_a_younger_prefill():
    under_test = scheduler(num_blocks=7, max_batch_size=2, max_tokens_per_step=2)
    add(under_test, "old", 4, max_tokens=25)
    add(under_test, "long", 16, max_tokens=1)
    chunks = 0
    while under_test.num_preemptions == 0:
        planned = step(under_test)
        assert planned["old"][1] >= 1
        assert not planned.get("long", (0, 0, False))[2]
        chunks += "long" in planned
    assert chunks > 4
    assert list(planned) == ["old"]
    assert under_test.progress(RequestKey("long")).num_cached == 0


def test_a_request_preempted_after_it_was_planned_leaves_the_step():
    under_test = scheduler(num_blocks=3)
    add(under_test, "old", 4, max_tokens=9)
    add(under_test, "young", 2, max_tokens=5)
    step(under_test)
    # Several known tokens at once make a decoding request prefill again, behind younger decodes.
    under_test.progress(RequestKey("old")).num_tokens += 7
    assert step(under_test) == {"young": (2, 1, True), "old": (4, 4, False)}
    assert step(under_test) == {"old": (8, 4, True)}
    assert under_test.progress(RequestKey("young")).preemptions == 1


def test_no_request_starts_in_the_block_that_a_running_one_needs_next():
    under_test = scheduler(num_blocks=2)
    add(under_test, "old", 4, max_tokens=3)
    add(under_test, "young", 3, max_tokens=1)
    assert step(under_test) == {"old": (0, 4, True)}
    assert step(under_test) == {"old": (4, 1, True)}
    under_test.remove(RequestKey("old"))
    assert step(under_test) == {"young": (0, 3, True)}
    assert under_test.num_preemptions == 0


def test_a_request_that_can_never_fit_is_refused_with_the_limit():
    under_test = scheduler(num_blocks=2)
    add(under_test, "fits", 5, max_tokens=4)
    with pytest.raises(InvalidRequestError, match="holds 9 tokens") as caught:
        add(under_test, "no", 5, max_tokens=5)
    assert caught.value.field == "max_tokens"


def test_a_request_that_just_fits_runs_to_its_end_alone():
    under_test = scheduler(num_blocks=2)
    add(under_test, "a", 5, max_tokens=4)
    samples = 0
    while samples < 4:
        samples += step(under_test)["a"][2]
    assert under_test.progress(RequestKey("a")).num_cached == 8


def test_more_than_max_waiting_requests_are_refused():
    under_test = scheduler(max_batch_size=1, max_waiting=2)
    for key in "abc":
        add(under_test, key, 1)
    with pytest.raises(OverloadedError, match="3 requests"):
        add(under_test, "d", 1)
    under_test.remove(RequestKey("b"))
    add(under_test, "d", 1)


def test_a_key_in_use_is_refused():
    under_test = scheduler()
    add(under_test, "a", 1)
    with pytest.raises(InvalidRequestError, match="request_key"):
        add(under_test, "a", 1)


def test_removed_requests_leave_no_block_behind():
    under_test = scheduler()
    add(under_test, "running", 6)
    step(under_test)
    add(under_test, "waiting", 6)
    for key in ("running", "waiting"):
        under_test.remove(RequestKey(key))
        under_test.check_integrity()
    assert (under_test.num_blocks_used, under_test.num_running, under_test.num_waiting) == (0, 0, 0)
    assert under_test.schedule().rows == ()


def test_a_step_that_was_not_run_is_planned_again():
    under_test = scheduler()
    add(under_test, "a", 5)
    first = under_test.schedule().rows[0]
    again = under_test.schedule().rows[0]
    assert (first.context_len, first.num_tokens) == (again.context_len, again.num_tokens) == (0, 5)
    assert first.block_table.tolist() == again.block_table.tolist()
    assert under_test.progress(RequestKey("a")).blocks_allocated == 2


def test_a_request_removed_before_commit_is_ignored():
    under_test = scheduler()
    add(under_test, "a", 5)
    add(under_test, "b", 2)
    planned = under_test.schedule()
    under_test.remove(RequestKey("a"))
    under_test.commit(planned)
    under_test.check_integrity()
    assert under_test.progress(RequestKey("b")).num_cached == 2


def test_no_step_exceeds_its_token_budget_or_batch_size():
    under_test = scheduler(num_blocks=30, max_batch_size=3, max_tokens_per_step=5)
    for index in range(9):
        add(under_test, str(index), 1 + 4 * (index % 4), max_tokens=6)
    produced = dict.fromkeys(map(str, range(9)), 0)
    for _ in range(200):
        rows = step(under_test)
        assert len(rows) <= 3
        assert sum(count for _, count, _ in rows.values()) <= 5
        for key, (_, _, samples) in rows.items():
            produced[key] += samples
            if produced[key] == 6:
                under_test.remove(RequestKey(key))
        if not rows:
            break
    assert set(produced.values()) == {6}


def drafting(num_tokens=5, num_drafts=2, num_blocks=100, max_tokens=100, **config):
    """A scheduler with one decoding request "a" that brings drafts."""
    under_test = scheduler(num_blocks, **config)
    add(under_test, "a", num_tokens, max_tokens)
    planned = under_test.schedule()
    under_test.commit(planned, drafts={RequestKey("a"): num_drafts})
    return under_test


def test_drafts_run_with_the_last_known_token():
    under_test = drafting()
    (row,) = under_test.schedule().rows
    assert (row.context_len, row.num_tokens, row.num_drafts, row.samples) == (5, 1, 2, True)
    assert len(row.block_table) * BLOCK_SIZE >= 8


def test_right_drafts_are_cached_and_the_others_computed_again():
    under_test = drafting()
    planned = under_test.schedule()
    under_test.commit(planned, accepted={RequestKey("a"): 1})
    under_test.check_integrity()
    assert step(under_test) == {"a": (7, 1, True)}


def test_drafts_stay_within_the_budget_and_the_length_asked_for():
    assert drafting(max_tokens_per_step=5, num_drafts=7).schedule().rows[0].num_drafts == 4
    # Of four tokens one is known, and the fourth is drawn but never fed.
    assert drafting(max_tokens=4, num_drafts=7).schedule().rows[0].num_drafts == 2
    assert drafting(max_tokens=2, num_drafts=7).schedule().rows[0].num_drafts == 0


def test_nobody_is_preempted_for_drafts():
    under_test = scheduler(num_blocks=3)
    add(under_test, "a", 4, 9)
    add(under_test, "b", 3, 2)
    planned = under_test.schedule()
    under_test.commit(planned, drafts={RequestKey("a"): 7})
    planned = under_test.schedule()  # two blocks are used, and the third is all that is left
    assert {r.request_key: r.num_drafts for r in planned.rows} == {"a": 3, "b": 0}
    assert planned.preempted == ()


def test_a_preempted_request_comes_back_without_drafts():
    under_test = scheduler(num_blocks=3, max_batch_size=2)
    add(under_test, "old", 4, 9)
    add(under_test, "young", 4, 5)
    for _ in range(9):
        planned = under_test.schedule()
        under_test.commit(planned, drafts={RequestKey("young"): 1})
        if under_test.num_preemptions:
            break
    assert under_test.num_preemptions == 1
    assert under_test.progress(RequestKey("young")).num_drafts == 0
    under_test.check_integrity()


def blocks(under_test):
    """Run one step; return {key: blocks held}."""
    planned = under_test.schedule()
    under_test.commit(planned)
    under_test.check_integrity()
    return {row.request_key: len(row.block_table) for row in planned.rows}


def test_looking_ahead_takes_a_block_for_the_token_after():
    under_test = scheduler(ahead=True)
    add(under_test, "room for it", 3)
    add(under_test, "none", 4)
    assert blocks(under_test) == {"room for it": 1, "none": 2}


def test_looking_ahead_takes_no_block_that_is_never_used():
    under_test = scheduler(ahead=True)
    add(under_test, "chunk", 10)  # its next step is known to be a prefill
    assert blocks(under_test) == {"chunk": 2}
    under_test.remove(RequestKey("chunk"))
    add(under_test, "one token", 4, max_tokens=1)  # which is never stored
    assert blocks(under_test) == {"one token": 1}


def test_looking_ahead_takes_what_is_free_and_preempts_nobody():
    under_test = scheduler(num_blocks=3, ahead=True)
    add(under_test, "a", 2, max_tokens=9)
    add(under_test, "b", 3, max_tokens=9)
    assert blocks(under_test) == {"a": 1, "b": 1}
    assert blocks(under_test) == {"a": 1, "b": 2}
    assert blocks(under_test) == {"a": 1, "b": 2}  # a would have liked one
    assert under_test.num_preemptions == 0
    assert blocks(under_test) == {"a": 2}  # now it must have one
    assert under_test.num_preemptions == 1
