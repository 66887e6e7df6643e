"""An Engine whose model runs in a process of its own, seen from the server's process.

submit, abort ──▶ link ──▶ the process of the engine: EngineLoop
emit ◀── reader thread ◀── link ◀── the outputs of each step, in one message

The two share no interpreter: making responses takes no time from the steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import subprocess
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from deepseek_triton.engine.admission import Admission
from deepseek_triton.engine.delivery import Delivery
from deepseek_triton.engine.link import (
    COMPILE,
    STATS,
    Abort,
    Answer,
    Call,
    Close,
    Link,
    Submit,
    unpack_output,
)
from deepseek_triton.engine.state import Emit
from deepseek_triton.errors import EngineDeadError, InvalidRequestError
from deepseek_triton.metrics import EngineStats
from deepseek_triton.request import FinishReason, Request, RequestKey, TokenOutput
from deepseek_triton.text.guide import GuideText

_logger = logging.getLogger(__name__)

_REAP_S = 5.0  # from the end of the connection to the end of the process


class _Live:
    """A request whose last output has not come."""

    __slots__ = ("emit", "last", "num_prompt")

    def __init__(self, request: Request, emit: Emit) -> None:
        self.emit = emit
        self.num_prompt = len(request.prompt_token_ids)
        self.last: tuple[Any, ...] | None = None  # its newest output, packed

    def end(self, key: RequestKey, error: EngineDeadError) -> TokenOutput:
        """Return the output that ends the request with `error`."""
        if self.last is None:
            last = TokenOutput(key, -1, (), (), 0.0, self.num_prompt, 0)
        else:
            last = unpack_output(self.last)
        return dataclasses.replace(
            last,
            index=last.index + 1,
            token_ids=(),
            log_probs=(),
            top_log_probs=(),
            finish_reason=FinishReason.ERROR,
            error=error,
        )


class RemoteEngine:
    """A thread-safe Engine. Requests are checked here, so that a submit waits for nobody."""

    def __init__(
        self,
        link: Link,
        process: subprocess.Popen[bytes],
        admission: Admission,
        on_death: Callable[[], object] | None = None,
    ) -> None:
        """`process` is this engine's to end.

        `on_death` is called once, by another thread, if the engine dies of an error or its process
        ends unasked, after every request was told so.
        """
        self._link = link
        self._process = process
        self._admission = admission
        self._on_death = on_death
        self._deliver = Delivery(self.abort)
        self._numbers = itertools.count()
        self._stats = EngineStats()
        # The lock guards the fields below.
        self._lock = threading.Lock()
        self._live: dict[RequestKey, _Live] = {}
        self._calls: dict[int, SimpleQueue[Answer]] = {}
        self._refusal: EngineDeadError | None = None  # why nothing is accepted any more
        self._reader = threading.Thread(target=self._read, name="engine-read", daemon=True)
        self._reader.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted and make progress."""
        return self._refusal is None

    def submit(self, request: Request, emit: Emit) -> None:
        """Accept a request; `emit` is called on the reader thread. See Engine."""
        self._admission.check(request)
        key = request.request_key
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            if key in self._live:
                raise InvalidRequestError("request_key", f"{key} is in use by another request")
            self._admission.check_room(len(self._live))
            self._live[key] = _Live(request, emit)
        # Should the process be gone, the reader ends the request.
        self._send(Submit(request))

    def abort(self, request_key: RequestKey, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End a request before the next step; see Engine."""
        with self._lock:
            found = request_key in self._live
        if found:
            self._send(Abort(request_key, reason))
        return found

    def stats(self) -> EngineStats:
        """Ask the engine for counts and gauges; those of the last time once it has ended."""
        try:
            self._stats = self.call(STATS)
        except EngineDeadError:
            self._stats = dataclasses.replace(self._stats, requests_active=0, requests_waiting=0)
        return self._stats

    def call(self, name: str, *arguments: Any) -> Any:
        """Ask the process of the engine and wait; raises the error that it answers with.

        Raises EngineDeadError when it has ended.
        """
        number = next(self._numbers)
        answers: SimpleQueue[Answer] = SimpleQueue()
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            self._calls[number] = answers
        self._send(Call(number, name, arguments))
        answer = answers.get()
        if answer.error is not None:
            raise answer.error
        return answer.value

    def close(self, timeout_s: float = 60.0) -> None:
        """Cancel what runs, send all outputs, end the process; after `timeout_s`, kill it.

        Idempotent.
        """
        with self._lock:
            self._refusal = self._refusal or EngineDeadError("the engine is shutting down")
            self._on_death = None
        self._send(Close())
        self._reader.join(timeout_s)
        if self._reader.is_alive():
            _logger.error("the engine's process does not end; it is killed")
            self._process.kill()
            self._reader.join(_REAP_S)
        self._link.close()

    def _send(self, message: object) -> None:
        try:
            self._link.send(message)
        except OSError:
            _logger.debug("the engine's process took no %s", type(message).__name__)

    def _read(self) -> None:
        """Body of the reader thread: until the engine's process has ended."""
        try:
            while True:
                message = self._link.receive()
                if isinstance(message, Answer):
                    self._answer(message)
                else:
                    self._take_outputs(message)
        except EOFError:
            pass
        except Exception:
            _logger.exception("a message of the engine's process cannot be read; it is killed")
            self._process.kill()
        self._end()

    def _take_outputs(self, step: list[tuple[Any, ...]]) -> None:
        deliveries = []
        death: EngineDeadError | None = None
        with self._lock:
            for packed in step:
                output = unpack_output(packed)
                live = self._live[output.request_key]
                live.last = packed
                deliveries.append((live.emit, output))
                if output.finish_reason is not None:
                    del self._live[output.request_key]
                if isinstance(output.error, EngineDeadError):
                    death = output.error
            if death is not None:
                self._refusal = self._refusal or death
        self._deliver(deliveries)

    def _answer(self, answer: Answer) -> None:
        with self._lock:
            answers = self._calls.pop(answer.number)
        answers.put(answer)

    def _end(self) -> None:
        """The process has ended: answer whoever waits for it."""
        death = EngineDeadError(
            f"the engine's process died ({how_it_ended(self._process)}); restart the server"
        )
        with self._lock:
            self._refusal = self._refusal or death
            live, self._live = self._live, {}
            calls, self._calls = self._calls, {}
            on_death = self._on_death
        if on_death is not None:
            _logger.critical("%s", self._refusal)
        for number, answers in calls.items():
            answers.put(Answer(number, error=self._refusal))
        self._deliver([(one.emit, one.end(key, self._refusal)) for key, one in live.items()])
        if on_death is not None:
            on_death()


class RemoteGuides:
    """Has guides compiled where they are used."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    def compile(self, kind: str, text: str) -> GuideText:
        """Return a guide. Raises InvalidRequestError for an unknown kind or a broken text."""
        self._engine.call(COMPILE, kind, text)
        return GuideText(kind, text)


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """Wait for the end of a process whose connection has ended, and return it in words."""
    try:
        code = process.wait(_REAP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    return f"signal {-code}" if code < 0 else f"status {code}"
