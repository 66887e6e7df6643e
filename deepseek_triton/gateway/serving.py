"""The HTTP server around the application: how it starts, and above all how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Generator
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from deepseek_triton.arguments import label
from deepseek_triton.errors import ConfigError
from deepseek_triton.gateway.app import create_app
from deepseek_triton.gateway.config import GatewayOptions
from deepseek_triton.gateway.errors import bad_request
from deepseek_triton.gateway.running import RunningRequests
from deepseek_triton.gateway.served_model import ServedModel

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.05
_LAST_WORDS_S = 1.0  # for clients to take the error that ends their request
# For Triton servers to let go of many requests that were cancelled. One that is stopped in the
# middle of that waits for the rest until its own time is up.
_LET_GO_S = 1.0
_UVICORN_SLACK_S = 5.0  # after which uvicorn would cut what we did not end


class GatewayServer(uvicorn.Server):
    """Ends requests by itself where uvicorn would cut them off with nothing said."""

    def __init__(
        self, config: uvicorn.Config, requests: RunningRequests, exit_timeout_s: float
    ) -> None:
        super().__init__(config)
        self._requests = requests
        self._exit_timeout_s = exit_timeout_s
        self._interrupted = False

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `should_exit` is set; raises KeyboardInterrupt if a signal did that.

        Raises ConfigError for an address that it cannot listen on.
        """
        with _unlogged_refusals() as refusals:
            try:
                super().run(sockets)
            except SystemExit as error:
                reason, way_out = _explain(refusals[-1] if refusals else None)
                raise ConfigError(
                    f"the gateway cannot listen on {self._url()}: {reason}; {way_out}"
                ) from error
        if self._interrupted:
            raise KeyboardInterrupt

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and only then say so."""
        await super().startup(sockets)
        logger.info("listening on %s/v1", self._url())

    def _url(self) -> str:
        """Return the server's URL, with the port that it got where any was to do."""
        host, port = self.config.host, self.config.port
        for server in getattr(self, "servers", []):
            port = server.sockets[0].getsockname()[1]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Stop on a signal, SIGHUP too.

        uvicorn would raise the signals again in the end, which by default kills this process.
        """
        handlers = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take note of a signal; a second one, if it is SIGINT, sets `force_exit`."""
        self._interrupted = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, and wait for those that run until it is time to end them."""
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        await ending
        if self.force_exit:  # uvicorn leaves it out then, and its end is a traceback
            await self.lifespan.shutdown()

    async def _end_requests(self) -> None:
        if not self._requests:
            return
        limit = self._exit_timeout_s
        logger.info("stopping: %d requests have %g s to finish", len(self._requests), limit)
        deadline = time.monotonic() + limit
        while self._requests and not self.force_exit and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        if not self._requests:
            return
        logger.warning("ending %d requests that still run", len(self._requests))
        self._requests.end()
        deadline = time.monotonic() + _LAST_WORDS_S
        connections = self.server_state.connections
        while (self._requests or connections) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        for connection in list(connections):  # of clients that do not read
            connection.transport.abort()
        if not self.force_exit:
            await asyncio.sleep(_LET_GO_S)


@contextlib.contextmanager
def _unlogged_refusals() -> Generator[list[OSError], None, None]:
    """Collect the errors that uvicorn would log, bare, before it ends with a SystemExit."""
    refusals: list[OSError] = []

    def keep(record: logging.LogRecord) -> bool:
        if isinstance(record.msg, OSError):
            refusals.append(record.msg)
            return False
        return True

    log = logging.getLogger("uvicorn.error")
    log.addFilter(keep)
    try:
        yield refusals
    finally:
        log.removeFilter(keep)


def _explain(refusal: OSError | None) -> tuple[str, str]:
    """Return why the address cannot be listened on, and the way out."""
    host, port = map(label, ("--gateway-host", "--gateway-port"))
    if refusal is None:
        return "the log says why", f"choose another {host} or {port}"
    if refusal.errno == errno.EADDRINUSE:
        return "the port is in use", f"stop what listens there or choose another {port}"
    # asyncio puts the address into its text once more; what a resolver says has no number of ours.
    known = (refusal.errno or 0) in errno.errorcode
    reason = os.strerror(refusal.errno or 0) if known else refusal.strerror or str(refusal)
    return reason, f"choose another {host} or {port}"


class _Protocol(H11Protocol):
    """Answers what is no HTTP in the form of every other error."""

    def _should_upgrade(self) -> bool:
        return False  # there are no WebSockets here, and no need of a warning for each request

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer has begun: there is no place for another one
            return
        body = json.dumps(bad_request(None, msg).body()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def make_server(options: GatewayOptions, model: ServedModel) -> GatewayServer:
    """Return the HTTP server, not yet running. Raises ConfigError for a bad key file."""
    requests = RunningRequests()
    config = uvicorn.Config(
        create_app(options, model, requests=requests),
        host=options.host,
        port=options.port,
        http=_Protocol,
        ws="none",
        access_log=False,  # the gateway writes its own
        log_level="warning",
        timeout_graceful_shutdown=int(options.exit_timeout_s + _UVICORN_SLACK_S),
        # Longer than clients keep theirs: a request on a connection that closes is an error there.
        timeout_keep_alive=75,
        server_header=False,
    )
    return GatewayServer(config, requests, options.exit_timeout_s)


def interrupt_on_signals() -> None:
    """Let signals that stop a process take Ctrl-C's path, KeyboardInterrupt.

    SIGINT too: a shell starts processes in the background with SIGINT ignored.
    """
    for number in _SIGNALS:
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
