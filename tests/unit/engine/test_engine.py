import dataclasses
import math

import numpy as np
import pytest

from deepseek_triton.config import SchedulerConfig
from deepseek_triton.engine.engine import StepEngine
from deepseek_triton.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
)
from deepseek_triton.request import FinishReason, Request, RequestKey, SamplingParams
from deepseek_triton.runner.sampler import sample
from tests.unit.engine.scripted_runner import Collector, ScriptedRunner

SEEDED = SamplingParams(temperature=1.0, seed=1, return_log_probs=True)


def request(key="a", prompt=(1, 2, 3), max_tokens=6, sampling=None, **fields):
    return Request(
        RequestKey(key), tuple(prompt), max_tokens, sampling or SamplingParams(), **fields
    )


def engine(num_blocks=64, runner=None, max_context_len=None, clock=None, **config):
    config = {"max_batch_size": 4, "max_tokens_per_step": 8, **config}
    return StepEngine(
        runner or ScriptedRunner(num_blocks),
        SchedulerConfig(**config),
        max_context_len=max_context_len,
        **({"monotonic_ns": clock} if clock else {}),
    )


def run_to_end(under_test, limit=2000):
    for _ in range(limit):
        if not under_test.has_requests:
            return
        under_test.step()
        under_test.check_integrity()
    raise RuntimeError("requests do not end")


def run(under_test, *requests):
    collectors = [Collector() for _ in requests]
    for item, collector in zip(requests, collectors, strict=True):
        under_test.submit(item, collector)
    run_to_end(under_test)
    return collectors


def alone(item):
    return run(engine(), item)[0]


def test_a_request_gets_max_tokens_one_output_each_and_one_finish_reason():
    (taken,) = run(engine(), request(max_tokens=6))
    assert len(taken.tokens) == len(taken.outputs) == 6
    assert [o.finish_reason for o in taken.outputs] == [None] * 5 + [FinishReason.LENGTH]
    assert {o.num_input_tokens for o in taken.outputs} == {3}


def test_greedy_tokens_are_the_likeliest_of_the_whole_context():
    runner, prompt = ScriptedRunner(64), [1, 2, 3]
    (taken,) = run(engine(), request(prompt=prompt, max_tokens=5))
    expected = list(prompt)
    for _ in range(5):
        expected.append(int(runner.logits(RequestKey("a"), np.array(expected)).argmax()))
    assert taken.tokens == expected[3:]


def test_the_end_id_ends_a_request_and_is_not_part_of_it():
    tokens = alone(request(max_tokens=6)).tokens
    (taken,) = run(engine(), request(max_tokens=6, end_id=tokens[3]))
    assert taken.tokens == tokens[:3]
    assert taken.finish_reason is FinishReason.STOP
    assert taken.outputs[-1].token_ids == ()
    (taken,) = run(engine(), request(max_tokens=6, end_id=63, more_end_ids=(tokens[2], 62)))
    assert taken.tokens == tokens[:2]


def test_min_tokens_keeps_a_request_going_to_exactly_max_tokens():
    end_id = alone(request()).tokens[0]
    sampling = SamplingParams(min_tokens=20)
    (taken,) = run(engine(), request(max_tokens=20, end_id=end_id, sampling=sampling))
    assert len(taken.tokens) == 20
    assert end_id not in taken.tokens
    assert taken.finish_reason is FinishReason.LENGTH


def test_log_probs_are_one_per_token_and_sum_to_the_cumulative_one():
    for sampling in (SEEDED, SamplingParams(return_log_probs=True)):
        (taken,) = run(engine(), request(max_tokens=9, sampling=sampling))
        assert len(taken.log_probs) == 9
        assert all(math.isfinite(value) and value <= 0 for value in taken.log_probs)
        assert taken.outputs[-1].cum_log_prob == pytest.approx(sum(taken.log_probs))
    (taken,) = run(engine(), request())
    assert taken.log_probs == []
    assert taken.outputs[-1].cum_log_prob == 0.0


def test_the_same_seed_gives_the_same_tokens_whatever_the_load():
    seeds = {str(seed): SamplingParams(temperature=1.0, seed=seed) for seed in range(5)}
    solo = {k: alone(request(k, max_tokens=10, sampling=s)).tokens for k, s in seeds.items()}
    assert len({tuple(tokens) for tokens in solo.values()}) == 5
    for order in (list(seeds), list(seeds)[::-1]):
        requests = [request(k, max_tokens=10, sampling=seeds[k]) for k in order]
        for key, taken in zip(order, run(engine(), *requests), strict=True):
            assert taken.tokens == solo[key]


def test_without_a_seed_two_runs_differ():
    unseeded = request(max_tokens=20, sampling=SamplingParams(temperature=1.0))
    assert alone(unseeded).tokens != alone(unseeded).tokens


def test_a_preempted_request_goes_on_as_if_nothing_had_happened():
    items = [request(str(i), prompt=[i] * 4, max_tokens=20, sampling=SEEDED) for i in range(4)]
    under_test = engine(num_blocks=8)
    together = run(under_test, *items)
    assert under_test.stats().preemptions_total > 0
    for item, taken in zip(items, together, strict=True):
        expected = alone(item)
        assert taken.tokens == expected.tokens
        assert taken.log_probs == expected.log_probs
    assert sum(t.outputs[-1].stats.preemptions for t in together) == (
        under_test.stats().preemptions_total
    )


def test_aborting_frees_the_blocks_and_sends_one_last_output():
    under_test = engine(max_batch_size=1)
    running, waiting = Collector(), Collector()
    under_test.submit(request("running"), running)
    under_test.submit(request("waiting"), waiting)
    under_test.step()
    for key, taken in (("running", running), ("waiting", waiting)):
        assert under_test.abort(RequestKey(key)) is True
        assert taken.finish_reason is FinishReason.CANCELLED
        assert taken.outputs[-1].token_ids == ()
        assert under_test.abort(RequestKey(key)) is False
    assert under_test.stats().kv_blocks_used == 0
    assert not under_test.has_requests


def test_an_abort_is_counted_and_told_by_its_reason():
    under_test, taken = engine(), Collector()
    under_test.submit(request(), taken)
    assert under_test.abort(RequestKey("a"), FinishReason.STOP) is True
    assert taken.finish_reason is FinishReason.STOP
    finished = under_test.stats().requests_finished_total
    assert (finished["stop"], finished["cancelled"]) == (1, 0)


def test_aborting_an_unknown_request_does_nothing():
    assert engine().abort(RequestKey("nobody")) is False


def test_deadlines_end_running_and_waiting_requests():
    now = [100]
    under_test = engine(max_batch_size=1, clock=lambda: now[0])
    running, waiting, later = Collector(), Collector(), Collector()
    under_test.submit(request("running", max_tokens=50, deadline_ns=200), running)
    under_test.submit(request("waiting", deadline_ns=150), waiting)
    under_test.submit(request("later", deadline_ns=300), later)
    under_test.step()
    assert waiting.outputs == []
    now[0] = 150
    under_test.step()
    assert waiting.finish_reason is FinishReason.CANCELLED
    assert len(running.tokens) == 2
    now[0] = 200
    under_test.step()
    assert running.finish_reason is FinishReason.CANCELLED
    assert len(running.tokens) == 2
    assert len(later.tokens) == 1


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": (1, 64)}, "prompt"),
        ({"prompt": (-1,)}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 18}, "max_tokens"),  # over max_context_len
        ({"prompt": (1,) * 10, "max_tokens": 4}, "max_tokens"),  # over the KV cache
    ],
)
def test_a_request_that_can_never_run_is_refused_and_leaves_nothing(fields, field):
    under_test = engine(num_blocks=3, max_context_len=20)
    with pytest.raises(InvalidRequestError) as caught:
        under_test.submit(request(**{"max_tokens": 3, **fields}), Collector())
    assert caught.value.field == field
    assert not under_test.has_requests


def test_a_request_just_within_every_limit_runs():
    (taken,) = run(engine(num_blocks=3, max_context_len=13), request(prompt=[1] * 10, max_tokens=3))
    assert len(taken.tokens) == 3


def test_too_many_requests_are_refused_as_overload():
    under_test = engine(max_batch_size=1, max_waiting=1)
    for key in "ab":
        under_test.submit(request(key), Collector())
    with pytest.raises(OverloadedError):
        under_test.submit(request("c"), Collector())


class OverflowingRunner(ScriptedRunner):
    """Gives NaN for one request once it has three output tokens."""

    def logits(self, request_key, tokens):
        logits = super().logits(request_key, tokens)
        if request_key == "bad" and len(tokens) >= 6:
            logits[5] = np.nan
        return logits


def test_logits_that_are_not_finite_end_only_their_request_and_with_advice():
    good, bad = run(engine(runner=OverflowingRunner(64)), request("good"), request("bad"))
    assert bad.finish_reason is FinishReason.ERROR
    assert len(bad.tokens) == 3
    assert "fp32" in str(bad.outputs[-1].error)
    assert good.tokens == alone(request("good")).tokens


class OverflowingPrompts(ScriptedRunner):
    """Says so of the chunk of one request that holds token 60."""

    def run(self, rows):
        result = super().run(rows)
        loud = (i for i, r in enumerate(rows) if r.request_key == "bad" and 60 in r.token_ids)
        return dataclasses.replace(result, overflowed=tuple(loud))


def test_a_chunk_that_overflowed_ends_only_its_request_at_once_and_with_advice():
    runner = OverflowingPrompts(64)
    under_test = engine(runner=runner, max_tokens_per_step=4)
    prompt = [1, 2, 3, 4, 60, 6, 7, 8, 9, 10, 11]
    bad, good = run(under_test, request("bad", prompt=prompt), request("good"))
    assert (bad.finish_reason, bad.tokens) == (FinishReason.ERROR, [])
    assert "PRECISION=fp32" in str(bad.outputs[-1].error)
    chunks = [row for rows in runner.steps for row in rows if row.request_key == "bad"]
    assert (len(chunks), chunks[-1].sampling) == (2, None)
    assert good.tokens == alone(request("good")).tokens
    assert under_test.stats().kv_blocks_used == 0


class RefusingRunner(ScriptedRunner):
    """Refuses one request whenever it is in a step."""

    def run(self, rows):
        if any(row.request_key == "bad" for row in rows):
            raise RequestFailedError("bad", "cannot run this one")
        return super().run(rows)


def test_a_failure_of_one_request_ends_that_one_and_the_others_keep_their_tokens():
    items = [request(key, max_tokens=8, sampling=SEEDED) for key in ("good", "bad", "fine")]
    good, bad, fine = run(engine(runner=RefusingRunner(64)), *items)
    assert (bad.finish_reason, bad.tokens) == (FinishReason.ERROR, [])
    assert isinstance(bad.outputs[-1].error, RequestFailedError)
    assert good.tokens == fine.tokens == alone(items[0]).tokens


def test_a_failure_that_names_no_known_request_is_raised():
    class Lying(ScriptedRunner):
        def run(self, rows):
            raise RequestFailedError("nobody", "unknown")

    under_test = engine(runner=Lying(64))
    under_test.submit(request(), Collector())
    with pytest.raises(RequestFailedError):
        under_test.step()


def test_failing_all_answers_running_and_waiting_requests():
    under_test = engine(max_batch_size=1)
    collectors = [Collector(), Collector()]
    for key, taken in zip("ab", collectors, strict=True):
        under_test.submit(request(key), taken)
    under_test.step()
    error = EngineDeadError("gone")
    under_test.fail_all(error)
    for taken in collectors:
        assert taken.finish_reason is FinishReason.ERROR
        assert taken.outputs[-1].error is error
    under_test.check_integrity()


def test_a_receiver_that_raises_is_cancelled_alone():
    under_test = engine()
    received, other = [], Collector()

    def broken(output):
        received.append(output)
        raise OSError("connection lost")

    under_test.submit(request("broken", max_tokens=50), broken)
    under_test.submit(request("other"), other)
    run_to_end(under_test)
    assert [o.finish_reason for o in received] == [None, FinishReason.CANCELLED]
    assert len(other.tokens) == 6


def test_stats_count_what_happened():
    under_test = engine(max_batch_size=1)
    for key in "abc":
        under_test.submit(request(key), Collector())
    under_test.step()
    stats = under_test.stats()
    assert (stats.requests_active, stats.requests_waiting) == (1, 2)
    assert (stats.kv_blocks_used, stats.kv_blocks_total) == (1, 64)
    under_test.abort(RequestKey("c"))
    run_to_end(under_test)
    stats = under_test.stats()
    assert (stats.requests_active, stats.requests_waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert (stats.prompt_tokens_total, stats.tokens_generated_total) == (9, 12)
    assert stats.requests_finished_total == {"length": 2, "cancelled": 1, "stop": 0, "error": 0}
    assert stats.steps_total == 12
    assert 0 < stats.runner_seconds_total < stats.step_seconds_total


def test_times_and_blocks_of_a_request_are_told():
    (taken,) = run(engine(), request(prompt=[1] * 4, max_tokens=6))
    stats = taken.outputs[-1].stats
    times = (
        stats.arrival_time_ns,
        stats.first_scheduled_time_ns,
        stats.first_token_time_ns,
        stats.last_token_time_ns,
    )
    assert list(times) == sorted(times)
    assert times[0] > 0
    assert stats.kv_blocks_allocated == 3  # 4 + 6 − 1 tokens in blocks of 4


def test_closing_cancels_what_runs_and_frees_the_model():
    runner = ScriptedRunner(64)
    under_test, taken = engine(runner=runner), Collector()
    under_test.submit(request(), taken)
    under_test.close()
    under_test.close()
    assert runner.closed
    assert not under_test.is_alive
    assert taken.finish_reason is FinishReason.CANCELLED


def test_the_scripted_runner_detects_a_wrong_block_table():
    runner = ScriptedRunner(8)
    under_test = engine(runner=runner)
    under_test.submit(request(prompt=[1] * 6), Collector())
    under_test.step()
    under_test.step()
    good = runner.steps[-1][0]
    wrong = type(good)(
        good.request_key, good.token_ids, good.context_len, good.block_table[::-1], good.sampling
    )
    with pytest.raises(RuntimeError, match="does not hold"):
        runner.run((wrong,))


def test_the_scripted_runner_samples_as_the_real_ones_do():
    runner = ScriptedRunner(8)
    logits = runner.logits(RequestKey("a"), np.array([1, 2, 3]))
    (taken,) = run(engine(runner=runner), request(max_tokens=1, sampling=SEEDED))
    sampling = runner.steps[0][0].sampling
    token_ids, log_probs = sample(logits[None], [sampling])
    assert (taken.tokens, taken.log_probs) == (token_ids.tolist(), log_probs.tolist())
