"""Outputs of a step that are sent while a device works on the next one."""

import pytest

from deepseek_triton.config import SchedulerConfig
from deepseek_triton.engine.engine import StepEngine
from deepseek_triton.request import FinishReason, Request, RequestKey
from tests.unit.engine.scripted_runner import ScriptedRunner


class DeviceRunner(ScriptedRunner):
    """Says when its device works; may lose it in a step."""

    def __init__(self, log, breaks_in=-1):
        super().__init__(64)
        self.meanwhile, self.log, self.breaks_in = None, log, breaks_in

    def run(self, rows, following=()):
        self.log.append("launch")
        if len(self.steps) == self.breaks_in:
            raise RuntimeError("device lost")
        self.meanwhile()
        self.log.append("wait")
        return super().run(rows)


def engine_of(log, **settings):
    def deliver(deliveries):
        log.extend((o.request_key, o.index, o.finish_reason) for _, o in deliveries)

    config = SchedulerConfig(max_batch_size=4, max_tokens_per_step=8)
    return StepEngine(DeviceRunner(log, **settings), config, deliver=deliver)


def submit(engine, key, max_tokens):
    engine.submit(Request(RequestKey(key), (1, 2, 3), max_tokens), lambda _: None)


def test_outputs_travel_while_the_next_step_runs_and_the_last_ones_at_once():
    log = []
    engine = engine_of(log)
    submit(engine, "a", 3)
    while engine.has_requests:
        engine.step()
    assert log == [
        *("launch", "wait"),
        *("launch", ("a", 0, None), "wait"),
        *("launch", ("a", 1, None), "wait", ("a", 2, FinishReason.LENGTH)),
    ]


def test_a_cancelled_request_gets_what_it_was_owed_first():
    log = []
    engine = engine_of(log)
    submit(engine, "a", 9)
    submit(engine, "b", 9)
    engine.step()
    assert engine.abort(RequestKey("a"))
    assert log[2:] == [("a", 0, None), ("b", 0, None), ("a", 1, FinishReason.CANCELLED)]


def test_a_lost_device_loses_no_output_of_earlier_steps():
    log = []
    engine = engine_of(log, breaks_in=1)
    submit(engine, "a", 9)
    engine.step()
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    engine.cancel_all()
    assert log == ["launch", "wait", "launch", ("a", 0, None), ("a", 1, FinishReason.CANCELLED)]


def test_receivers_that_are_called_directly_are_called_between_steps():
    log = []
    runner = DeviceRunner(log)
    runner.meanwhile = lambda: None
    engine = StepEngine(runner, SchedulerConfig())
    engine.submit(Request(RequestKey("a"), (1, 2, 3), 2), lambda o: log.append(o.index))
    engine.step()
    assert log == ["launch", "wait", 0]
