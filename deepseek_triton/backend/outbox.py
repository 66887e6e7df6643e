"""Sends the engine's outputs to Triton from a thread of its own: no step waits for a client.

engine ──▶ emit ──▶ pending, by request ──▶ outbox thread ──▶ Reply.send

Sending takes a round trip to the server each time. A request that falls behind gets what piled up
as one response: under load a response carries more, and none is lost or late.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from deepseek_triton.errors import InvalidRequestError
from deepseek_triton.log import request_logger
from deepseek_triton.request import RequestKey, TokenOutput

_logger = logging.getLogger(__name__)

_MAX_BACKLOG = 8  # outputs of one request that still go out one by one
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

    def due(self) -> float:
        """Return when to send what is pending (time.monotonic())."""
        if self.outputs[-1].finish_reason is not None:
            return self.last_contact
        return self.last_contact + self.reply.interval_s

    def take(self) -> list[TokenOutput]:
        """Remove and return the outputs of the next response."""
        merge_all = self.reply.interval_s > 0 or len(self.outputs) > _MAX_BACKLOG
        count = len(self.outputs) if merge_all else 1
        taken, self.outputs = self.outputs[:count], self.outputs[count:]
        return taken


class Outbox:
    """Thread-safe. `abort` is called with the key of a request whose reply raised."""

    def __init__(self, abort: Callable[[RequestKey], object]) -> None:
        self._abort = abort
        # The condition guards the fields below and the outputs of entries.
        self._changed = threading.Condition()
        self._entries: dict[RequestKey, _Entry] = {}
        self._pending: dict[RequestKey, _Entry] = {}  # those with outputs
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
                self._pending[request_key] = entry
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

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (contacts := self._take()):
                    if self._closing:
                        return
                    self._changed.wait(self._next_wake())
            for key, entry, outputs in contacts:
                self._contact(key, entry, outputs)

    def _take(self) -> list[tuple[RequestKey, _Entry, list[TokenOutput]]]:
        """Return whom to contact now, and with what; no outputs: a beat."""
        now = time.monotonic()
        contacts = []
        for key, entry in list(self._pending.items()):
            if entry.due() <= now or self._closing:
                outputs = entry.take()
                contacts.append((key, entry, outputs))
                if not entry.outputs:
                    del self._pending[key]
                if outputs[-1].finish_reason is not None:
                    del self._entries[key]
        if now >= self._next_scan:
            interval = max(_BEAT_S, len(self._entries) / _MAX_BEATS_PER_S)
            self._next_scan = now + interval / 4
            for key, entry in self._entries.items():
                if not entry.outputs and entry.last_contact <= now - interval:
                    contacts.append((key, entry, []))
        return contacts

    def _next_wake(self) -> float | None:
        """Return the seconds until something is due; None: nothing is."""
        if not self._entries:
            return None
        due = min((entry.due() for entry in self._pending.values()), default=self._next_scan)
        return max(0.0, min(due, self._next_scan) - time.monotonic())

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
