"""The engine on a thread of its own, and its outputs sent from another one.

submit, abort ──▶ inbox ──▶ engine thread: StepEngine.step() ──▶ outgoing ──▶ sender thread ──▶ emit
(any thread, never wait for a step)                          (sending overlaps the next step)
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from enum import Enum
from queue import SimpleQueue
from types import TracebackType

from deepseek_triton.config import SchedulerConfig
from deepseek_triton.engine.delivery import Deliveries, Delivery
from deepseek_triton.engine.engine import StepEngine
from deepseek_triton.engine.state import Emit, RequestState
from deepseek_triton.errors import EngineDeadError, InvalidRequestError
from deepseek_triton.metrics import EngineStats
from deepseek_triton.request import FinishReason, Request, RequestKey
from deepseek_triton.runner.base import ModelRunner

_logger = logging.getLogger(__name__)


class _Phase(Enum):
    """Life of a loop; it only moves down this list."""

    OPEN = "open"
    DRAINING = "draining"  # accepts nothing, finishes what it has
    CANCELLING = "cancelling"  # accepts nothing, ends what it has
    DEAD = "dead"  # a step raised


class EngineLoop:
    """A thread-safe Engine around a StepEngine. Outputs of one request keep their order."""

    def __init__(
        self,
        runner: ModelRunner,
        config: SchedulerConfig | None = None,
        *,
        max_context_len: int | None = None,
        deliver: Callable[[Deliveries], None] | None = None,
        on_death: Callable[[], object] | None = None,
    ) -> None:
        """Start the threads; `runner` is used, and closed, by this loop alone.

        `deliver` takes the outputs of a step on the sender thread; by default each goes to its
        receiver. `on_death` is called when a step raised, after the last outputs were handed over.
        """
        self._runner = runner
        self._deliver = deliver or Delivery(self.abort)
        self._on_death = on_death
        self._outgoing: SimpleQueue[Deliveries | None] = SimpleQueue()
        self._engine = StepEngine(
            runner, config, max_context_len=max_context_len, deliver=self._queue_outputs
        )
        self.admission = self._engine.admission
        # The condition guards the four fields below.
        self._changed = threading.Condition()
        self._inbox: list[RequestState | tuple[RequestKey, FinishReason]] = []  # a pair: abort
        self._live: set[RequestKey] = set()  # accepted, last output not made yet
        self._phase = _Phase.OPEN
        self._death: EngineDeadError | None = None
        self._engine_thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._sender_thread = threading.Thread(target=self._send, name="engine-send", daemon=True)
        self._engine_thread.start()
        self._sender_thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted and make progress."""
        return self._phase is _Phase.OPEN and self._engine_thread.is_alive()

    def submit(self, request: Request, emit: Emit) -> None:
        """Accept a request; `emit` is called on the sender thread. See Engine."""
        state = self._engine.prepare(request, emit)
        key = request.request_key
        with self._changed:
            if self._phase is not _Phase.OPEN:
                raise self._death or EngineDeadError("the engine is shutting down")
            if key in self._live:
                raise InvalidRequestError("request_key", f"{key} is in use by another request")
            self.admission.check_room(len(self._live))
            self._live.add(key)
            self._inbox.append(state)
            self._changed.notify()

    def abort(self, request_key: RequestKey, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End a request before the next step; see Engine."""
        with self._changed:
            if request_key not in self._live:
                return False
            self._inbox.append((request_key, reason))
            self._changed.notify()
            return True

    def stats(self) -> EngineStats:
        """Return counts and gauges; requests not seen by a step yet count as waiting."""
        stats = self._engine.stats()
        waiting = max(0, len(self._live) - stats.requests_active)
        return dataclasses.replace(stats, requests_waiting=waiting)

    def close(self, *, drain: bool = False, timeout_s: float = 30.0) -> None:
        """Stop accepting, finish (`drain`) or cancel what runs, send all outputs, free the model.

        After `timeout_s` a drain turns into a cancel. Idempotent. A runner that hangs in a step is
        left behind, unfreed, with an error in the log.
        """
        self._move_to(_Phase.DRAINING if drain else _Phase.CANCELLING)
        self._engine_thread.join(timeout_s)
        if drain and self._engine_thread.is_alive():
            self._move_to(_Phase.CANCELLING)
            self._engine_thread.join(timeout_s)
        if self._engine_thread.is_alive():
            _logger.error("a step does not return; the model stays loaded")
            return
        self._sender_thread.join(timeout_s)
        self._runner.close()

    def __enter__(self) -> EngineLoop:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _move_to(self, phase: _Phase) -> None:
        with self._changed:
            order = list(_Phase)
            if order.index(phase) > order.index(self._phase):
                self._phase = phase
                self._changed.notify()

    def _serve(self) -> None:
        """Body of the engine thread."""
        try:
            while self._take_inbox():
                self._engine.step()
        except Exception as error:
            _logger.exception("the engine stopped")
            self._die(error)
        finally:
            self._outgoing.put(None)

    def _take_inbox(self) -> bool:
        """Wait for work and take what came in; False when the loop ends."""
        with self._changed:
            while not (self._inbox or self._engine.has_requests or self._phase is not _Phase.OPEN):
                self._changed.wait()
            inbox, self._inbox = self._inbox, []
            phase = self._phase
        for item in inbox:
            if isinstance(item, RequestState):
                self._engine.admit(item)
            else:
                self._engine.abort(*item)
        if phase is _Phase.CANCELLING:
            self._engine.cancel_all()
        return phase is _Phase.OPEN or self._engine.has_requests

    def _die(self, error: Exception) -> None:
        """Answer every request, taken or not, with the error; later submits are refused."""
        death = EngineDeadError(
            f"the engine stopped on {type(error).__name__}: {error}; restart the server"
        )
        with self._changed:
            self._phase, self._death = _Phase.DEAD, death
            inbox, self._inbox = self._inbox, []
        for item in inbox:
            if isinstance(item, RequestState):
                self._engine.admit(item)
        self._engine.fail_all(death)

    def _queue_outputs(self, deliveries: Deliveries) -> None:
        """Called by the engine thread at the end of each step."""
        ended = [output.request_key for _, output in deliveries if output.finish_reason is not None]
        if ended:
            with self._changed:
                self._live.difference_update(ended)
        self._outgoing.put(deliveries)

    def _send(self) -> None:
        """Body of the sender thread."""
        while (deliveries := self._outgoing.get()) is not None:
            self._deliver(deliveries)
        if self._death is not None and self._on_death is not None:
            self._on_death()
