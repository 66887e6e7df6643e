"""What every request passes: id, key and limits, size of its body, log line and metrics.

Pure ASGI: Starlette's BaseHTTPMiddleware would copy every chunk of a stream through a queue, and
hide that the client is gone.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from deepseek_triton.gateway.config import GatewayOptions
from deepseek_triton.gateway.errors import ApiError, server_error, stopping
from deepseek_triton.gateway.keys import KeyRing
from deepseek_triton.gateway.metrics import GatewayMetrics
from deepseek_triton.gateway.record import RequestRecord, attach
from deepseek_triton.gateway.running import RunningRequests
from deepseek_triton.gateway.streaming import EVENT_STREAM, event

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_GUARDED = re.compile(r"/(v1/|tokenize$|detokenize$)")
_KNOWN_ROUTES = re.compile(r"/(v1/[a-z/]{1,40}|tokenize|detokenize|health|ready|metrics|)")


class Gate:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: App,
        options: GatewayOptions,
        metrics: GatewayMetrics,
        keys: KeyRing | None,
        requests: RunningRequests,
    ) -> None:
        self._app = app
        self._options = options
        self._metrics = metrics
        self._keys = keys
        self._requests = requests

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        sent_id = headers.get("x-request-id", "")
        request_id = sent_id if _REQUEST_ID.fullmatch(sent_id) else uuid.uuid4().hex
        record = RequestRecord(request_id, scope["method"], scope["path"])
        attach(scope, record)
        sender = _Sender(send, record)
        self._metrics.in_flight += 1
        try:
            with self._requests.hold():
                await self._answer(scope, headers, receive, sender)
        except ApiError as error:
            await sender.end_with(error, scope, receive)
        except asyncio.CancelledError:
            if not self._requests.ended:
                raise
            await sender.end_with(stopping(), scope, receive)
        except Exception as error:
            # Not left to Starlette, which knows no streams and raises it again for uvicorn to log.
            _logger.exception("request %s failed", request_id)
            problem = server_error(f"{type(error).__name__} in the gateway")
            await sender.end_with(problem, scope, receive)
        finally:
            self._finish(record)

    async def _answer(
        self, scope: MutableMapping[str, Any], headers: Headers, receive: Receive, sender: _Sender
    ) -> None:
        leave: Callable[[], None] | None = None
        record = sender.record
        try:
            leave = self._admit(scope, headers, record)
            body = await self._read_body(receive, headers.get("content-length", ""))
            if self._requests.ended:  # before Python 3.12 wait_for may lose a cancellation
                raise stopping()
            if body is None:
                record.disconnected = True
            else:
                await self._app(scope, _replay(body, receive), sender.send)
        finally:
            if leave is not None:
                leave()

    def _admit(
        self, scope: MutableMapping[str, Any], headers: Headers, record: RequestRecord
    ) -> Callable[[], None] | None:
        # A browser asks for permission (OPTIONS) without the key.
        if self._keys is None or scope["method"] == "OPTIONS":
            return None
        if not _GUARDED.match(scope["path"]):
            return None
        authorization = headers.get("authorization", "")
        record.key = self._keys.name_of(authorization)
        return self._keys.admit(authorization)

    async def _read_body(self, receive: Receive, announced: str) -> bytes | None:
        """Return the request's body, None if the client left. Raises ApiError 413 or 408.

        It is read here, since FastAPI would turn any error on the way into its own.
        """
        self._check_size(int(announced) if announced.isascii() and announced.isdigit() else 0)
        body = bytearray()
        more = True
        deadline = time.monotonic() + self._options.body_timeout_s
        while more:
            try:
                message = await asyncio.wait_for(receive(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                raise ApiError(
                    408,
                    f"the request's body did not arrive within {self._options.body_timeout_s:g} s",
                    headers={"Connection": "close"},
                ) from None
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            self._check_size(len(body))
            more = message.get("more_body", False)
        return bytes(body)

    def _check_size(self, size: int) -> None:
        limit = self._options.max_body_bytes
        if size > limit:
            raise ApiError(
                413,
                f"the request's body has more than {limit} bytes; shorten it",
                code="request_too_large",
            )

    def _finish(self, record: RequestRecord) -> None:
        seconds = time.perf_counter() - record.started
        metrics = self._metrics
        metrics.in_flight -= 1
        route = record.path if _KNOWN_ROUTES.fullmatch(record.path) else "other"
        if record.status == 404:
            route = "other"  # or anybody could make up as many labels as there are paths
        metrics.requests[route, record.status] += 1
        metrics.disconnects += record.disconnected
        metrics.prompt_tokens += record.prompt_tokens
        metrics.cached_tokens += record.cached_tokens
        metrics.completion_tokens += record.completion_tokens
        if record.first_token_s is not None:
            metrics.first_token.observe(record.first_token_s)
            metrics.duration.observe(seconds)
        record.log(seconds)


class _Sender:
    """Adds the request's id to the response and notes its status."""

    def __init__(self, send: Send, record: RequestRecord) -> None:
        self._send = send
        self.record = record
        self._started = self._finished = self._streams = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self.record.status = message["status"]
            content_type = dict(message.get("headers", [])).get(b"content-type", b"")
            self._streams = content_type.startswith(EVENT_STREAM)
            request_id = (b"x-request-id", self.record.request_id.encode())
            message["headers"] = [*message.get("headers", []), request_id]
        else:
            self._finished = not message.get("more_body", False)
        await self._send(message)

    async def end_with(
        self, error: ApiError, scope: MutableMapping[str, Any], receive: Receive
    ) -> None:
        """Send `error` as the answer, or as the last event of a stream that has begun."""
        if self._finished:
            return
        self.record.error = error.code or error.kind
        if not self._started:
            response = JSONResponse(error.body(), error.status, error.headers)
            await response(scope, receive, self.send)
        elif self._streams:
            body = event(error.body())
            await self.send({"type": "http.response.body", "body": body, "more_body": False})


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives `body` first, and then what comes after it."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed
