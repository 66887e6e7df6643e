import threading
import time

import pytest

from deepseek_triton.config import SchedulerConfig
from deepseek_triton.engine.engine import StepEngine
from deepseek_triton.engine.loop import EngineLoop
from deepseek_triton.errors import EngineDeadError, InvalidRequestError, OverloadedError
from deepseek_triton.request import FinishReason, Request, RequestKey, SamplingParams
from tests.unit.engine.scripted_runner import Collector, ScriptedRunner

WAIT_S = 20.0


class Waiter(Collector):
    """A Collector that another thread can wait for."""

    def __init__(self):
        super().__init__()
        self.started, self.ended = threading.Event(), threading.Event()

    def __call__(self, output):
        super().__call__(output)
        self.started.set()
        if output.finish_reason is not None:
            self.ended.set()

    def wait(self):
        assert self.ended.wait(WAIT_S), "no last output"
        return self


class GatedRunner(ScriptedRunner):
    """Each step waits until the test lets it go."""

    def __init__(self, num_blocks=64):
        super().__init__(num_blocks)
        self.entered, self.gate = threading.Semaphore(0), threading.Semaphore(0)

    def run(self, rows):
        self.entered.release()
        assert self.gate.acquire(timeout=WAIT_S)
        return super().run(rows)


class BreakingRunner(ScriptedRunner):
    """The device is lost after some steps."""

    def __init__(self, num_blocks=64, good_steps=3):
        super().__init__(num_blocks)
        self.good_steps = good_steps

    def run(self, rows):
        if len(self.steps) == self.good_steps:
            raise MemoryError("device lost")
        return super().run(rows)


def request(key="a", max_tokens=6, prompt=(1, 2, 3), **fields):
    return Request(RequestKey(key), prompt, max_tokens, **fields)


def loop_of(runner=None, **config):
    config = {"max_batch_size": 4, "max_tokens_per_step": 8, **config}
    return EngineLoop(runner or ScriptedRunner(64), SchedulerConfig(**config))


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.002)


def test_requests_from_many_threads_get_what_they_would_get_alone():
    def sampling(index):
        return SamplingParams(temperature=1.0, seed=index)

    expected = []
    for index in range(12):
        engine, taken = StepEngine(ScriptedRunner(64)), Collector()
        engine.submit(request(str(index), sampling=sampling(index)), taken)
        while engine.has_requests:
            engine.step()
        expected.append(taken.tokens)
    waiters = [Waiter() for _ in range(12)]
    with loop_of(ScriptedRunner(8)) as loop:
        threads = [
            threading.Thread(
                target=loop.submit, args=(request(str(i), sampling=sampling(i)), waiters[i])
            )
            for i in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [waiter.wait().tokens for waiter in waiters] == expected
        assert loop.stats().requests_finished_total["length"] == 12


def test_submit_and_abort_do_not_wait_for_a_running_step():
    runner = GatedRunner()
    loop = loop_of(runner)
    first, second = Waiter(), Waiter()
    loop.submit(request("first"), first)
    assert runner.entered.acquire(timeout=WAIT_S)
    loop.submit(request("second"), second)
    assert loop.stats().requests_waiting == 1
    assert loop.abort(RequestKey("second")) is True
    assert loop.abort(RequestKey("first"), FinishReason.STOP) is True
    assert not first.ended.is_set()
    runner.gate.release(2)
    assert first.wait().finish_reason is FinishReason.STOP
    assert second.wait().finish_reason is FinishReason.CANCELLED
    assert second.tokens == []
    until(lambda: loop.stats().kv_blocks_used == 0)
    loop.close()


def test_requests_that_came_during_a_step_run_in_order_of_arrival():
    runner = GatedRunner()
    loop = loop_of(runner, max_batch_size=1)
    waiters = {key: Waiter() for key in "abcd"}
    loop.submit(request("a", max_tokens=1), waiters["a"])
    assert runner.entered.acquire(timeout=WAIT_S)
    for key in "bcd":
        loop.submit(request(key, max_tokens=1), waiters[key])
    runner.gate.release(4)
    for waiter in waiters.values():
        waiter.wait()
    assert [row.request_key for rows in runner.steps for row in rows] == list("abcd")
    loop.close()


def test_aborting_an_unknown_or_ended_request_does_nothing():
    with loop_of() as loop:
        assert loop.abort(RequestKey("nobody")) is False
        waiter = Waiter()
        loop.submit(request(), waiter)
        waiter.wait()
        assert loop.abort(RequestKey("a")) is False


def test_a_slow_receiver_does_not_hold_up_the_steps():
    release, runner = threading.Event(), ScriptedRunner(64)

    class Slow(Waiter):
        def __call__(self, output):
            assert release.wait(WAIT_S)
            super().__call__(output)

    slow = Slow()
    with loop_of(runner) as loop:
        loop.submit(request(max_tokens=5), slow)
        until(lambda: len(runner.steps) == 5)
        assert slow.outputs == []
        release.set()
        assert len(slow.wait().tokens) == 5


def test_a_receiver_that_raises_cancels_its_request_alone():
    class Broken(Waiter):
        def __call__(self, output):
            super().__call__(output)
            raise OSError("connection lost")

    broken, other = Broken(), Waiter()
    with loop_of() as loop:
        loop.submit(request("broken", max_tokens=200), broken)
        loop.submit(request("other"), other)
        assert len(other.wait().tokens) == 6
        # What was made before the abort is dropped; the last output comes all the same.
        until(lambda: loop.stats().requests_finished_total["cancelled"] == 1)
        assert loop.is_alive


def test_an_idle_loop_uses_no_processor_time():
    waiter = Waiter()
    with loop_of() as loop:
        loop.submit(request(), waiter)
        waiter.wait()
        time.sleep(0.05)
        before, steps = time.process_time(), loop.stats().steps_total
        time.sleep(0.3)
        assert loop.stats().steps_total == steps
        assert time.process_time() - before < 0.1


def test_a_deadline_ends_a_request():
    waiter = Waiter()
    with loop_of(ScriptedRunner(2000)) as loop:
        soon = time.monotonic_ns() + 20_000_000
        loop.submit(request(max_tokens=7000, deadline_ns=soon), waiter)
        assert waiter.wait().finish_reason is FinishReason.CANCELLED
        assert len(waiter.tokens) < 7000


def test_a_refused_request_is_refused_at_once():
    with loop_of() as loop:
        taken = Waiter()
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            loop.submit(request(max_tokens=0), taken)
        assert taken.outputs == []
        assert loop.is_alive


def test_too_many_requests_are_refused_and_a_key_in_use_too():
    runner = GatedRunner()
    loop = loop_of(runner, max_batch_size=1, max_waiting=1)
    first, second = Waiter(), Waiter()
    loop.submit(request("first", max_tokens=1), first)
    with pytest.raises(InvalidRequestError, match="request_key"):
        loop.submit(request("first"), Waiter())
    loop.submit(request("second", max_tokens=1), second)
    with pytest.raises(OverloadedError, match="2 requests"):
        loop.submit(request("third"), Waiter())
    runner.gate.release(2)
    first.wait()
    second.wait()
    loop.submit(request("third", max_tokens=1), third := Waiter())
    runner.gate.release()
    third.wait()
    loop.close()


def test_a_dead_engine_answers_everyone_and_refuses_the_rest():
    runner = BreakingRunner()
    loop = loop_of(runner, max_batch_size=2)
    waiters = [Waiter() for _ in range(4)]
    for index, waiter in enumerate(waiters):
        loop.submit(request(str(index), max_tokens=50), waiter)
    for waiter in waiters:
        assert waiter.wait().finish_reason is FinishReason.ERROR
        error = waiter.outputs[-1].error
        assert isinstance(error, EngineDeadError)
        assert "MemoryError: device lost" in str(error)
    until(lambda: not loop.is_alive)
    with pytest.raises(EngineDeadError, match="device lost"):
        loop.submit(request("late"), Waiter())
    assert loop.abort(RequestKey("0")) is False
    assert loop.stats().kv_blocks_used == 0
    loop.close()
    assert runner.closed


def test_a_request_that_came_while_the_engine_died_is_answered():
    class Gated(GatedRunner):
        def run(self, rows):
            super().run(rows)
            raise MemoryError("device lost")

    runner = Gated()
    loop = loop_of(runner)
    waiters = [Waiter(), Waiter()]
    loop.submit(request("first"), waiters[0])
    assert runner.entered.acquire(timeout=WAIT_S)
    loop.submit(request("second"), waiters[1])
    runner.gate.release()
    for waiter in waiters:
        assert isinstance(waiter.wait().outputs[-1].error, EngineDeadError)
    loop.close()


def test_closing_cancels_what_runs_and_frees_the_model():
    runner = ScriptedRunner(2000)
    loop, waiter = loop_of(runner), Waiter()
    loop.submit(request(max_tokens=7000), waiter)
    assert waiter.started.wait(WAIT_S)
    loop.close()
    assert waiter.finish_reason is FinishReason.CANCELLED
    assert runner.closed
    assert not loop.is_alive
    with pytest.raises(EngineDeadError, match="shutting down"):
        loop.submit(request("late"), Waiter())
    loop.close()


def test_draining_finishes_what_was_accepted():
    loop = loop_of(max_batch_size=1)
    waiters = [Waiter() for _ in range(3)]
    for index, waiter in enumerate(waiters):
        loop.submit(request(str(index)), waiter)
    loop.close(drain=True)
    for waiter in waiters:
        assert waiter.finish_reason is FinishReason.LENGTH


def test_a_drain_that_takes_too_long_turns_into_a_cancel():
    loop, waiter = loop_of(ScriptedRunner(2000)), Waiter()
    loop.submit(request(max_tokens=7000), waiter)
    assert waiter.started.wait(WAIT_S)
    loop.close(drain=True, timeout_s=0.05)
    assert waiter.wait().finish_reason is FinishReason.CANCELLED


def test_a_step_that_hangs_does_not_hang_the_close():
    runner = GatedRunner()
    loop, waiter = loop_of(runner), Waiter()
    loop.submit(request(), waiter)
    assert runner.entered.acquire(timeout=WAIT_S)
    loop.close(timeout_s=0.05)
    assert not runner.closed
    runner.gate.release()
    assert waiter.wait().finish_reason is FinishReason.CANCELLED
    loop.close()
    assert runner.closed
