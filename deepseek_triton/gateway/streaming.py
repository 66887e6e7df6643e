"""Server-sent events, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deepseek_triton.gateway.record import record_of

_T = TypeVar("_T")

DONE = b"data: [DONE]\n\n"
EVENT_STREAM = b"text/event-stream"


class ClientGone(Exception):
    """The client closed the connection; nobody reads the answer."""


def event(content: Mapping[str, Any]) -> bytes:
    """Return one event that holds a JSON object."""
    return b"data: %b\n\n" % json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


async def unless_client_leaves(request: Request, work: Awaitable[_T]) -> _T:
    """Return what `work` returns; cancel it and raise ClientGone if the client leaves first.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        record_of(request.scope).disconnected = True
        raise ClientGone
    finally:
        await _end(task, watcher)


class EventStream(Response):
    """A response of events; closing `events` is what ends their making.

    It starts with the first event, so that an error that comes before has its own status.
    Starlette's own StreamingResponse notices a client that left only when it sends.
    """

    media_type = EVENT_STREAM.decode()

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client leaves; raises an error before the first."""
        sender = asyncio.ensure_future(self._send_all(send))
        watcher = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((sender, watcher), return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
            else:
                record_of(scope).disconnected = True
                if not self._started:
                    raise ClientGone
        finally:
            await _end(sender, watcher)
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async for chunk in self._events:
            if not self._started:
                self._started = True
                await send(start)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(BaseException):
            await task
