"""An engine in a process of its own: a real child process, its runner scripted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepseek_triton.backend import engine_process
from deepseek_triton.backend.engine_process import start_engine, start_process
from deepseek_triton.config import EngineConfig, SchedulerConfig
from deepseek_triton.engine.admission import Admission
from deepseek_triton.engine.engine import Engine
from deepseek_triton.engine.link import Link
from deepseek_triton.engine.loop import EngineLoop
from deepseek_triton.engine.remote import RemoteEngine
from deepseek_triton.errors import (
    EngineDeadError,
    EngineMismatchError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
)
from deepseek_triton.request import FinishReason, Request, RequestKey, SamplingParams
from deepseek_triton.server.process_group import is_running
from tests.unit.backend.scripted_worker import END, TOKENIZER, Runner
from tests.unit.engine.test_loop import Waiter, until

WORKER = "tests.unit.backend.scripted_worker"
SCHEDULER = SchedulerConfig(max_batch_size=4, max_tokens_per_step=64, max_waiting=4)


class Child:
    """An engine, the process behind it, and the deaths that were told."""

    def __init__(self, name: str = "sound", config: SchedulerConfig = SCHEDULER) -> None:
        self.deaths: list[bool] = []
        self.engine, self.limits = start_process(
            EngineConfig(engine_dir=name, scheduler=config), self._died, WORKER
        )
        self.pid = self.engine._process.pid

    def _died(self) -> None:
        self.deaths.append(self.engine.is_alive)

    def submit(self, key: str, max_tokens: int = 6, **fields: Any) -> Waiter:
        waiter = Waiter()
        self.engine.submit(Request(RequestKey(key), (1, 2, 3), max_tokens, **fields), waiter)
        return waiter


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.engine.close()
    assert not is_running(child.pid)


def test_outputs_are_those_of_an_engine_in_this_process(child: Child) -> None:
    with EngineLoop(Runner("sound"), SCHEDULER) as loop:
        for seed in range(3):
            sampling = SamplingParams(
                temperature=1.0, seed=seed, return_log_probs=True, top_log_probs=2
            )
            here, there = Waiter(), child.submit(f"{seed}", 20, sampling=sampling)
            loop.submit(Request(RequestKey(f"{seed}"), (1, 2, 3), 20, sampling), here)
            here.wait(), there.wait()
            assert (there.tokens, there.log_probs) == (here.tokens, here.log_probs)
            assert [o.top_log_probs for o in there.outputs] == [
                o.top_log_probs for o in here.outputs
            ]
            assert there.outputs[-1].cum_log_prob == here.outputs[-1].cum_log_prob
    stats = there.outputs[-1].stats
    assert stats.arrival_time_ns <= stats.first_scheduled_time_ns <= stats.first_token_time_ns
    assert stats.kv_blocks_allocated > 0
    assert child.engine.stats().requests_finished_total["length"] == 3


def test_an_abort_and_a_deadline_end_a_request(child: Child) -> None:
    aborted, late = (
        child.submit("aborted", 9000),
        child.submit("late", 9000, deadline_ns=time.monotonic_ns() + 200_000_000),
    )
    assert aborted.started.wait(20.0)
    assert child.engine.abort(RequestKey("aborted"), FinishReason.STOP)
    assert aborted.wait().finish_reason is FinishReason.STOP
    assert late.wait().finish_reason is FinishReason.CANCELLED
    assert not child.engine.abort(RequestKey("aborted"))


def test_a_request_that_fails_ends_alone_with_its_error(child: Child) -> None:
    sound, broken = child.submit("sound", 50), child.submit("overflows")
    error = broken.wait().outputs[-1].error
    assert isinstance(error, RequestFailedError)
    assert error.request_key == "overflows" and "no finite logits" in str(error)
    assert sound.wait().finish_reason is FinishReason.LENGTH
    assert not child.deaths


def test_what_can_never_run_is_refused_at_once(child: Child) -> None:
    with pytest.raises(
        InvalidRequestError, match="max_tokens: .* context limit of 10000"
    ) as caught:
        child.submit("k", 10_000)
    assert caught.value.field == "max_tokens"
    running = [child.submit(f"{i}", 5000) for i in range(8)]
    with pytest.raises(InvalidRequestError, match="0 is in use"):
        child.submit("0")
    with pytest.raises(OverloadedError, match="8 requests"):
        child.submit("one more")
    for i in range(8):
        child.engine.abort(RequestKey(f"{i}"))
    for waiter in running:
        assert waiter.wait().finish_reason is FinishReason.CANCELLED


def test_a_guide_is_compiled_and_followed_there(child: Child) -> None:
    guide = child.limits.guides.compile("regex", "[ab]{3}c")
    sampling = SamplingParams(temperature=1.0, seed=3)
    for key in ("first", "second"):
        waiter = child.submit(key, 20, sampling=sampling, guide=guide, end_id=END).wait()
        text = TOKENIZER.decode(waiter.tokens)
        assert len(text) == 4 and set(text[:3]) <= {"a", "b"} and text[3] == "c"
        assert waiter.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [("regex", "(", "guided_decoding_guide: not a usable regex"),
     ("sonnet", "x", "guided_decoding_guide_type: 'sonnet' is not supported")],
)  # fmt: skip
def test_a_broken_guide_is_refused_when_it_is_sent(
    child: Child, kind: str, text: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        child.limits.guides.compile(kind, text)
    assert str(caught.value).startswith(message)
    assert caught.value.field == message.partition(":")[0]


def test_an_engine_without_guides_says_so() -> None:
    child = Child("no guides")
    assert child.limits.guides is None
    child.engine.close()


def test_closing_cancels_what_runs_and_ends_the_process(child: Child) -> None:
    waiter = child.submit("k", 9000)
    assert waiter.started.wait(20.0)
    child.engine.close()
    assert waiter.finish_reason is FinishReason.CANCELLED
    assert not is_running(child.pid) and child.engine._process.returncode == 0
    with pytest.raises(EngineDeadError, match="shutting down"):
        child.submit("late")
    assert child.engine.stats().requests_active == 0
    child.engine.close()
    assert not child.deaths


def test_a_step_that_hangs_does_not_hang_the_close() -> None:
    child = Child("hangs")
    waiter = child.submit("k")
    until(lambda: child.engine.stats().requests_active == 1)
    child.engine.close(timeout_s=0.2)
    assert isinstance(waiter.wait().outputs[-1].error, EngineDeadError)
    assert not is_running(child.pid)


def test_a_killed_process_ends_every_request_with_an_error() -> None:
    child = Child()
    waiters = [child.submit(f"{i}", 9000) for i in range(6)]
    assert waiters[0].started.wait(20.0)
    os.kill(child.pid, signal.SIGKILL)
    for waiter in waiters:
        error = waiter.wait().outputs[-1].error
        assert isinstance(error, EngineDeadError)
        assert "process died (signal 9); restart the server" in str(error)
    until(lambda: child.deaths == [False])
    with pytest.raises(EngineDeadError, match="signal 9"):
        child.submit("late")
    with pytest.raises(EngineDeadError, match="signal 9"):
        child.limits.guides.compile("json", "")
    assert child.engine.stats().requests_active == 0
    child.engine.close()
    assert child.deaths == [False]


def test_a_process_killed_while_idle_is_noticed_as_well(child: Child) -> None:
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: child.deaths == [False])


def test_a_step_that_raises_ends_engine_and_process() -> None:
    child = Child("breaks")
    error = child.submit("k").wait().outputs[-1].error
    assert isinstance(error, EngineDeadError)
    assert str(error) == "the engine stopped on MemoryError: device lost; restart the server"
    until(lambda: child.deaths == [False])
    assert child.engine._process.wait(20.0) == 1
    with pytest.raises(EngineDeadError, match="device lost"):
        child.submit("late")


def test_ctrl_c_and_sigterm_leave_it_running(child: Child) -> None:
    os.kill(child.pid, signal.SIGINT)
    os.kill(child.pid, signal.SIGTERM)
    assert child.submit("k").wait().finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("mismatch", EngineMismatchError, "rebuild it"),
        ("no memory", MemoryError, "too large"),
        ("unknown error", RuntimeError, "ScriptedError: the driver is too old"),
        ("killed", EngineDeadError, r"died while it loaded \(signal 9\)"),
    ],
)
def test_an_engine_that_does_not_load_says_why(
    name: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        Child(name)
    assert type(caught.value) is error


PARENT = """
import sys, time
from deepseek_triton.backend.engine_process import start_process
from deepseek_triton.config import EngineConfig
engine, _ = start_process(EngineConfig(engine_dir=sys.argv[1]), print, "{worker}")
print(engine._process.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("name", ["sound", "loads for ever"])
def test_a_killed_parent_takes_the_process_with_it(name: str) -> None:
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", PARENT.format(worker=WORKER), name]
    parent = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    until(lambda: not is_running(pid))
    parent.communicate()


def test_many_threads_may_submit(child: Child) -> None:
    results: list[Waiter] = []

    def ask(index: int) -> None:
        for turn in range(5):
            while True:
                try:
                    waiter = child.submit(f"{index}.{turn}", 10)
                except OverloadedError:
                    time.sleep(0.001)
                else:
                    break
            results.append(waiter.wait())

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [w.finish_reason for w in results] == [FinishReason.LENGTH] * 50
    assert len({tuple(w.tokens) for w in results}) == 1


@pytest.mark.parametrize(
    ("setting", "target", "own"),
    [
        ("auto", "cuda", True),
        ("auto", "tensorrt", True),
        ("auto", "tensorrt_rtx", True),
        ("auto", "onnxruntime", False),
        ("own", "onnxruntime", True),
        ("inline", "cuda", False),
    ],
)
def test_who_gets_a_process(
    monkeypatch: pytest.MonkeyPatch, setting: str, target: str, own: bool
) -> None:
    started: list[bool] = []

    def start(where: bool) -> Callable[..., Any]:
        return lambda *_, **__: started.append(where) or (None, None)

    manifest = SimpleNamespace(target=target)
    monkeypatch.setattr(
        engine_process, "load_engine_dir", lambda *_, **__: SimpleNamespace(manifest=manifest)
    )
    monkeypatch.setattr(engine_process, "start_process", start(True))
    monkeypatch.setattr(engine_process, "open_engine", start(False))
    start_engine(EngineConfig(engine_dir="e", engine_process=setting), lambda: None)
    assert started == [own]


def test_a_remote_engine_is_an_engine() -> None:
    missing = {n for n in vars(Engine) if not n.startswith("_")} - set(dir(RemoteEngine))
    assert not missing


def test_a_process_that_sends_nonsense_is_killed() -> None:
    ours, theirs = Pipe()
    process = subprocess.Popen(["/bin/sleep", "3600"])
    deaths: list[bool] = []
    admission = Admission(10, 10, Runner("sound").kv_cache_spec, 10, 10)
    engine = RemoteEngine(Link(ours), process, admission, lambda: deaths.append(engine.is_alive))
    theirs.send_bytes(b"no pickle")
    until(lambda: deaths == [False])
    assert process.returncode == -signal.SIGKILL
