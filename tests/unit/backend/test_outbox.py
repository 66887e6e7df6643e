from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from deepseek_triton.backend import outbox as module
from deepseek_triton.backend.outbox import Outbox, merge
from deepseek_triton.errors import InvalidRequestError
from deepseek_triton.request import FinishReason, TokenOutput
from tests.unit.backend.fakes import output


class FakeReply:
    def __init__(self, interval_s: float = 0.0, delay_s: float = 0.0) -> None:
        self.interval_s = interval_s
        self.delay_s = delay_s
        self.sent: list[TokenOutput] = []
        self.beats = 0
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None

    def send(self, output: TokenOutput) -> None:
        self.gate.wait(10)
        time.sleep(self.delay_s)
        if self.failure is not None:
            raise self.failure
        self.sent.append(output)

    def beat(self) -> None:
        self.beats += 1

    def refused(self) -> None:
        raise AssertionError("only the engine stage says that")


@pytest.fixture
def aborted() -> list[str]:
    return []


class FakeFlow:
    """As if `number` responses were on their way."""

    number = 0

    def on_the_way(self, now: float) -> int:
        return self.number


@pytest.fixture
def flow() -> FakeFlow:
    return FakeFlow()


@pytest.fixture
def box(aborted: list[str], flow: FakeFlow):
    box = Outbox(aborted.append, flow)
    yield box
    box.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.002)


def outputs(count: int) -> list[TokenOutput]:
    last = FinishReason.LENGTH
    return [output("k", i, (i,), last if i == count - 1 else None) for i in range(count)]


def test_each_output_of_a_stream_is_a_response(box: Outbox) -> None:
    reply = FakeReply()
    emit = box.open("k", reply)
    for item in outputs(5):
        emit(item)
    wait_for(lambda: len(reply.sent) == 5)
    assert reply.sent == outputs(5)


def test_while_postprocessing_is_behind_outputs_pile_up(box: Outbox, flow: FakeFlow) -> None:
    replies = [FakeReply() for _ in range(3)]
    emits = [box.open(f"k{i}", reply) for i, reply in enumerate(replies)]
    flow.number = module._WINDOW
    for index in range(5):
        for i, emit in enumerate(emits):
            emit(output(f"k{i}", index, (index,)))
        wait_for(lambda: all(reply.sent for reply in replies))  # the first do not wait
    time.sleep(0.02)
    assert [len(reply.sent) for reply in replies] == [1, 1, 1]
    flow.number = module._WINDOW - 1
    wait_for(lambda: all(len(reply.sent) == 2 for reply in replies))
    for reply in replies:
        assert [o.token_ids for o in reply.sent] == [(0,), (1, 2, 3, 4)]


def test_a_last_output_takes_along_what_piled_up_and_goes_first(
    box: Outbox, flow: FakeFlow
) -> None:
    waiting, ending = FakeReply(), FakeReply()
    emit_waiting, emit = box.open("waiting", waiting), box.open("k", ending)
    flow.number = module._WINDOW
    for index in range(4):
        emit_waiting(output("waiting", index, (index,)))
        emit(output("k", index, (index,), FinishReason.LENGTH if index == 3 else None))
        wait_for(lambda: bool(waiting.sent and ending.sent))
    wait_for(lambda: bool(ending.sent) and ending.sent[-1].finish_reason is not None)
    assert [o.token_ids for o in ending.sent] == [(0,), (1, 2, 3)]
    assert len(waiting.sent) == 1


def test_a_sender_that_is_behind_merges(box: Outbox) -> None:
    """Its own work alone is too slow here: 40 responses of 2 ms would come each 10 ms."""
    replies = [FakeReply(delay_s=0.002) for _ in range(40)]
    emits = [box.open(f"k{i}", reply) for i, reply in enumerate(replies)]
    for index in range(20):
        for i, emit in enumerate(emits):
            emit(output(f"k{i}", index, (index,), FinishReason.LENGTH if index == 19 else None))
        time.sleep(0.01)
    wait_for(lambda: all(r.sent and r.sent[-1].finish_reason is not None for r in replies))
    for reply in replies:
        assert [t for o in reply.sent for t in o.token_ids] == list(range(20))
    assert sum(len(reply.sent) for reply in replies) < 40 * 20 / 2


def test_a_slow_receiver_does_not_block_the_engine(box: Outbox) -> None:
    reply = FakeReply()
    reply.gate.clear()
    emit = box.open("k", reply)
    started = time.monotonic()
    for item in outputs(100):
        emit(item)
    assert time.monotonic() - started < 1
    reply.gate.set()


def test_with_an_interval_outputs_are_collected_but_the_end_comes_at_once(box: Outbox) -> None:
    reply = FakeReply(interval_s=3600.0)
    emit = box.open("k", reply)
    for item in outputs(20)[:-1]:
        emit(item)
    time.sleep(0.02)
    assert reply.sent == []
    emit(outputs(20)[-1])
    wait_for(lambda: len(reply.sent) == 1)
    assert reply.sent[0].token_ids == tuple(range(20))


def test_an_interval_that_has_passed_sends_what_there_is(box: Outbox) -> None:
    reply = FakeReply(interval_s=0.2)
    emit = box.open("k", reply)
    for item in outputs(4)[:-1]:
        emit(item)
    wait_for(lambda: len(reply.sent) == 1)
    assert reply.sent[0].token_ids == (0, 1, 2)


def test_silence_is_met_with_a_beat(box: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BEAT_S", 0.01)
    monkeypatch.setattr(module, "_MAX_BEATS_PER_S", 1000)
    reply = FakeReply()
    emit = box.open("k", reply)
    wait_for(lambda: reply.beats >= 2)
    emit(outputs(1)[0])
    wait_for(lambda: len(reply.sent) == 1)
    beats = reply.beats
    time.sleep(0.05)
    assert reply.beats == beats, "an ended request gets no beat"


def test_a_reply_that_fails_aborts_its_request_alone(box: Outbox, aborted: list[str]) -> None:
    broken, sound = FakeReply(), FakeReply()
    broken.failure = RuntimeError("gone")
    emit_broken, emit_sound = box.open("broken", broken), box.open("sound", sound)
    emit_broken(output("broken", 0, (1,)))
    emit_sound(output("sound", 0, (1,), FinishReason.LENGTH))
    wait_for(lambda: len(sound.sent) == 1 and bool(aborted))
    assert aborted == ["broken"]


def test_closing_sends_what_is_pending(aborted: list[str]) -> None:
    box = Outbox(aborted.append, FakeFlow())
    reply = FakeReply(interval_s=3600.0)
    emit = box.open("k", reply)
    emit(outputs(2)[0])
    box.close()
    assert [o.token_ids for o in reply.sent] == [(0,)]


def test_a_discarded_request_is_left_alone(box: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BEAT_S", 0.01)
    reply = FakeReply()
    box.open("k", reply)
    box.discard("k")
    time.sleep(0.05)
    assert reply.beats == 0


def test_a_key_in_use_is_refused_and_its_owner_is_untouched(box: Outbox) -> None:
    reply = FakeReply()
    emit = box.open("k", reply)
    with pytest.raises(InvalidRequestError, match="request_key: k is in use"):
        box.open("k", FakeReply())
    emit(output("k", 0, (1,), FinishReason.LENGTH))
    wait_for(lambda: len(reply.sent) == 1)
    box.open("k", FakeReply())


def test_merging_keeps_the_first_index_and_the_last_state() -> None:
    first = output("k", 3, (1,), log_probs=(-0.5,), cum_log_prob=-0.5)
    second = output("k", 4, (), FinishReason.STOP, cum_log_prob=-0.75, num_output_tokens=7)
    third = output("k", 4, (2,), log_probs=(-0.25,), cum_log_prob=-0.75, num_output_tokens=7)
    merged = merge([first, third])
    assert (merged.index, merged.token_ids, merged.log_probs) == (3, (1, 2), (-0.5, -0.25))
    assert (merged.cum_log_prob, merged.num_output_tokens) == (-0.75, 7)
    assert merge([first, second]).finish_reason is FinishReason.STOP
    assert merge([first]) is first
