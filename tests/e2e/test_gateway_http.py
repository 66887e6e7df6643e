"""HTTP that no client library would send: every answer has the form of an error all the same."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepseek_triton.server import RunningServer
from tests.e2e.support import wait_until
from tests.e2e.test_gateway import answers, running_gateway

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: a\r\n\r\n"
JSON = b"Connection: close\r\nContent-Type: application/json\r\n"
SURROGATE = b'{"prompt": "\\ud800"}'

CASES: dict[str, tuple[bytes, int]] = {
    "no HTTP": (b"hello\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "a header without a colon": (b"GET / HTTP/1.1\r\nHost x\r\n\r\n", 400),
    "a header too long": (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 100_000, 400),
    "two lengths": (CHAT + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\na", 400),
    "a chunk without a size": (CHAT + CHUNKED + b"zz\r\n", 400),
    "a WebSocket": (b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\n" + UPGRADE, 404),
    "no route": (b"GET /nowhere HTTP/1.1\r\nHost: x\r\n" + JSON + b"\r\n", 404),
    "a wrong method": (b"FOO /v1/models HTTP/1.1\r\nHost: x\r\n" + JSON + b"\r\n", 405),
    "a body that never comes": (CHAT + b"Content-Length: 9\r\n\r\nabc", 408),
    "too large a body": (CHAT + JSON + b"Content-Length: 2000\r\n\r\n", 413),
    "invalid UTF-8": (CHAT + JSON + b"Content-Length: 3\r\n\r\n\"\xff\"", 400),
    "half a surrogate pair": (
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\n" + JSON
        + b"Content-Length: %d\r\n\r\n" % len(SURROGATE) + SURROGATE,
        400,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def gateway(engine: Path, shared_server: RunningServer) -> Iterator[tuple[str, Path]]:
    log = engine.with_name("gateway-http.log")
    more = ("--body-timeout", "1", "--max-body-bytes", "1000")
    with running_gateway(engine, shared_server.grpc_url, log, *more) as url:
        yield url, log


def connect(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30.0)


def read_answer(connection: socket.socket) -> tuple[bytes, bytes]:
    """Return the head of an answer and its body, by its length."""
    with connection.makefile("rb") as file:
        lines = list(iter(file.readline, b"\r\n"))
        (length,) = (int(i[15:]) for i in lines if i.lower().startswith(b"content-length:"))
        return b"".join(lines), file.read(length)


@pytest.mark.parametrize("case", CASES)
def test_every_answer_is_an_error_in_json(gateway: tuple[str, Path], case: str) -> None:
    url, log = gateway
    sent, status = CASES[case]
    with connect(url) as connection:
        connection.sendall(sent)
        head, body = read_answer(connection)
    assert head.split()[1] == b"%d" % status
    assert b"\r\ncontent-type: application/json\r\n" in head.lower()
    error = json.loads(body)["error"]
    assert error["message"] and error["type"] == "invalid_request_error"
    assert answers(f"{url}/health")
    assert "Traceback" not in log.read_text()


def test_rubbish_after_an_answer_closes_the_connection(gateway: tuple[str, Path]) -> None:
    url, log = gateway
    with connect(url) as connection:
        connection.sendall(CHAT + CHUNKED + b"800\r\n" + b"a" * 0x800)
        head, _ = read_answer(connection)
        assert head.split()[1] == b"413"
        connection.sendall(b"rubbish\r\n")
        assert connection.recv(1) == b""
    wait_until(lambda: "Invalid HTTP" in log.read_text(), 10.0, "the log says why")
    assert "Traceback" not in log.read_text()
