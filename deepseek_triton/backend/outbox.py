"""Sends the engine's outputs to Triton from a thread of its own: no step waits for a client.

engine ──▶ emit ──▶ pending, by request ──▶ outbox thread ──▶ Reply.send

Sending takes a round trip to the server each time, and postprocessing takes its time as well. When
many responses are on their way to it, the thread waits until some were handled: a queue there would
only make all of them late. What piles up for a request in the meantime goes out as one response.
First and last outputs never wait; with few requests nothing does, and nothing is merged.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from deepseek_triton.backend.flow import Flow
from deepseek_triton.errors import InvalidRequestError
from deepseek_triton.log import request_logger
from deepseek_triton.request import RequestKey, TokenOutput

_logger = logging.getLogger(__name__)

_WINDOW = 16  # responses on their way to postprocessing; half of them keep it busy
_POLL_S = 0.001  # how soon it is seen that postprocessing got on
_BEAT_S = 0.5
_MAX_BEATS_PER_S = 50


class Reply(Protocol):
    """Answers one request; called by one thread."""

    @property
    def interval_s(self) -> float:
        """Least time between two responses that are not the last."""

    def send(self, output: TokenOutput) -> None:
        """Send what the engine made; `output` may be several of its outputs merged."""

    def beat(self) -> None:
        """Called when nothing was sent for a while: find out whether the client is gone."""

    def refused(self) -> None:
        """Called in place of all that when the engine refuses the request."""


class _Entry:
    """A request whose last output has not been sent."""

    def __init__(self, reply: Reply, now: float) -> None:
        self.reply = reply
        self.outputs: list[TokenOutput] = []
        self.last_contact = now
        self.is_new = True  # nothing has been sent

    @property
    def is_urgent(self) -> bool:
        """Whether it has its first or its last output to send, for which a client waits."""
        if self.outputs[-1].finish_reason is not None:
            return True
        return self.is_new and not self.reply.interval_s

    def due(self) -> float:
        """Return when to send what is pending (time.monotonic())."""
        return self.last_contact + self.reply.interval_s

    def take(self, merge_all: bool) -> list[TokenOutput]:
        """Remove and return the outputs of the next response."""
        count = len(self.outputs) if merge_all or self.reply.interval_s else 1
        taken, self.outputs = self.outputs[:count], self.outputs[count:]
        self.is_new = False
        return taken


class Outbox:
    """Thread-safe. `abort` is called with the key of a request whose reply raised."""

    def __init__(self, abort: Callable[[RequestKey], object], flow: Flow) -> None:
        """Replies to postprocessing mark in `flow` what they send."""
        self._abort = abort
        self._flow = flow
        # The condition guards the fields below and the outputs of entries.
        self._changed = threading.Condition()
        self._entries: dict[RequestKey, _Entry] = {}
        # Those with outputs, by who came first.
        self._urgent: dict[RequestKey, _Entry] = {}
        self._pending: dict[RequestKey, _Entry] = {}
        self._num_outputs = 0  # of all of them
        self._silent: list[RequestKey] = []  # whom to give a beat
        self._next_scan = 0.0  # when to look for silent ones (time.monotonic())
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def open(self, request_key: RequestKey, reply: Reply) -> Callable[[TokenOutput], None]:
        """Return the receiver of a request's outputs; the last of them closes it.

        Raises InvalidRequestError for a key in use.
        """
        entry = _Entry(reply, time.monotonic())
        with self._changed:
            if request_key in self._entries:
                raise InvalidRequestError(
                    "request_key", f"{request_key} is in use by another request"
                )
            self._entries[request_key] = entry
            self._changed.notify()

        def emit(output: TokenOutput) -> None:
            with self._changed:
                entry.outputs.append(output)
                self._num_outputs += 1
                self._queue(request_key, entry)
                self._changed.notify()

        return emit

    def discard(self, request_key: RequestKey) -> None:
        """Forget a request that the engine refused."""
        with self._changed:
            self._entries.pop(request_key, None)

    def close(self, timeout_s: float = 10.0) -> None:
        """Send what is pending and stop; call it after the engine has ended every request."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _queue(self, key: RequestKey, entry: _Entry) -> None:
        if entry.is_urgent:
            self._pending.pop(key, None)
            self._urgent[key] = entry
        elif key not in self._urgent:
            self._pending[key] = entry

    def _run(self) -> None:
        while True:
            with self._changed:
                while (contact := self._next()) is None:
                    if self._closing:
                        return
                    self._changed.wait(self._next_wake())
            self._contact(*contact)

    def _next(self) -> tuple[RequestKey, _Entry, list[TokenOutput]] | None:
        """Return whom to contact now, and with what; no outputs: a beat."""
        now = time.monotonic()
        on_the_way = self._flow.on_the_way(now)
        key = next(iter(self._urgent), None)
        if key is None and (on_the_way < _WINDOW or self._closing):
            due = (k for k, e in self._pending.items() if e.due() <= now or self._closing)
            key = next(due, None)
        if key is None:
            return self._next_silent(now)
        entry = self._urgent.pop(key, None) or self._pending.pop(key)
        outputs = entry.take(on_the_way >= _WINDOW // 2 or self._num_outputs > _WINDOW)
        self._num_outputs -= len(outputs)
        if entry.outputs:
            self._queue(key, entry)
        if outputs[-1].finish_reason is not None:
            del self._entries[key]
        return key, entry, outputs

    def _next_silent(self, now: float) -> tuple[RequestKey, _Entry, list[TokenOutput]] | None:
        interval = max(_BEAT_S, len(self._entries) / _MAX_BEATS_PER_S)
        if now >= self._next_scan:
            self._next_scan = now + interval / 4
            self._silent = list(self._entries)
        while self._silent:
            key = self._silent.pop()
            entry = self._entries.get(key)
            if entry and not entry.outputs and entry.last_contact <= now - interval:
                return key, entry, []
        return None

    def _next_wake(self) -> float | None:
        """Return the seconds until something is due; None: nothing is."""
        if not self._entries:
            return None
        now = time.monotonic()
        due = min((entry.due() for entry in self._pending.values()), default=self._next_scan)
        if due <= now:  # postprocessing is behind
            due = now + _POLL_S
        return max(0.0, min(due, self._next_scan) - now)

    def _contact(self, key: RequestKey, entry: _Entry, outputs: list[TokenOutput]) -> None:
        try:
            if outputs:
                entry.reply.send(merge(outputs))
            else:
                entry.reply.beat()
        except Exception:
            request_logger(_logger, key).exception("the response could not be sent")
            if not outputs or outputs[-1].finish_reason is None:
                self._abort(key)
        entry.last_contact = time.monotonic()


def merge(outputs: list[TokenOutput]) -> TokenOutput:
    """Return successive outputs of one request as one."""
    if len(outputs) == 1:
        return outputs[0]
    return dataclasses.replace(
        outputs[-1],
        index=outputs[0].index,
        token_ids=tuple(token_id for o in outputs for token_id in o.token_ids),
        log_probs=tuple(log_prob for o in outputs for log_prob in o.log_probs),
        top_log_probs=tuple(top for o in outputs for top in o.top_log_probs),
    )
