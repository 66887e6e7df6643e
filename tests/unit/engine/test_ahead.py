"""Which rows the engine lets a device begin with before their tokens are known."""

import pytest

from deepseek_triton.config import SchedulerConfig
from deepseek_triton.engine.engine import StepEngine
from deepseek_triton.request import FinishReason, Request, RequestKey, SamplingParams
from tests.unit.engine.scripted_runner import AheadRunner, Collector, ScriptedRunner
from tests.unit.engine.test_guided import Counting


class Watched(AheadRunner):
    """Keeps the keys of the rows that each step launched ahead."""

    def __init__(self, num_blocks=64):
        super().__init__(num_blocks)
        self.ahead = []

    def run(self, rows, following=()):
        self.ahead.append([str(each.row.request_key) for each in following])
        return super().run(rows, following)


def engine_of(runner, **config):
    return StepEngine(runner, SchedulerConfig(max_batch_size=4, max_tokens_per_step=8, **config))


def submit(engine, key, max_tokens=4, prompt=(1, 2, 3), **settings):
    collector = Collector()
    engine.submit(Request(RequestKey(key), prompt, max_tokens, **settings), collector)
    return collector


def run_out(engine):
    while engine.has_requests:
        engine.step()


def test_every_step_but_the_last_launches_the_next_which_takes_it():
    runner = Watched()
    engine = engine_of(runner)
    submit(engine, "a")
    run_out(engine)
    assert runner.ahead == [["a"], ["a"], ["a"], []]
    assert (runner.num_launched, runner.num_taken) == (3, 3)


def test_a_row_known_to_end_is_left_out_and_the_others_are_launched():
    runner = Watched()
    engine = engine_of(runner)
    submit(engine, "a", max_tokens=1)
    submit(engine, "b", max_tokens=2)
    run_out(engine)
    assert runner.ahead == [["b"], []]


def test_a_prompt_that_is_not_whole_yet_is_not_launched():
    runner = Watched()
    engine = engine_of(runner)
    submit(engine, "long", max_tokens=2, prompt=tuple(range(1, 12)))
    run_out(engine)
    assert runner.ahead == [[], ["long"], []]


NEEDS_TO_KNOW = [
    {"sampling": SamplingParams(repetition_penalty=1.2)},
    {"sampling": SamplingParams(frequency_penalty=0.5)},
    {"sampling": SamplingParams(presence_penalty=0.5)},
    {"sampling": SamplingParams(logit_bias=((5, 1.0),))},
    {"sampling": SamplingParams(top_log_probs=2)},
    {"guide": Counting(first=10, length=9)},
]


@pytest.mark.parametrize("settings", NEEDS_TO_KNOW)
def test_a_request_that_depends_on_the_last_token_keeps_its_step_from_being_launched(settings):
    runner = Watched()
    engine = engine_of(runner)
    submit(engine, "a", max_tokens=6)
    submit(engine, "b", max_tokens=3, **settings)
    run_out(engine)
    assert runner.ahead == [[], [], ["a"], ["a"], ["a"], []]  # b's last step can be launched from


def test_without_a_free_block_nothing_is_launched_and_nobody_is_preempted_for_it():
    runner, plain = Watched(num_blocks=2), ScriptedRunner(2)
    preemptions = []
    for each in (runner, plain):
        engine = engine_of(each)
        submit(engine, "a", max_tokens=2)  # 3 of a block's 4 slots
        submit(engine, "b", max_tokens=2, prompt=(4, 5, 6, 7))  # all of them
        run_out(engine)
        preemptions.append(engine.stats().preemptions_total)
    assert runner.ahead[0] == []
    assert preemptions[0] == preemptions[1]


def test_a_cancelled_row_costs_nothing_to_the_ones_beside_it():
    runner, plain = Watched(), ScriptedRunner(64)
    found = []
    for each in (runner, plain):
        engine = engine_of(each)
        a, b = submit(engine, "a", max_tokens=9), submit(engine, "b", max_tokens=9)
        for _ in range(3):
            engine.step()
        engine.abort(RequestKey("a"))
        run_out(engine)
        assert a.finish_reason is FinishReason.CANCELLED
        found.append((a.tokens, b.tokens))
    assert found[0] == found[1]
    assert runner.num_taken == runner.num_launched - 1  # a's row alone was for nothing
