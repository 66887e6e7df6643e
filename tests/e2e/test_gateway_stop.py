"""A gateway that is stopped: requests finish, or are ended in words."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from deepseek_triton.server import RunningServer
from tests.e2e.support import is_idle, metrics, settled, wait_until
from tests.e2e.test_gateway import HELLO, LONG, MODEL, answers, gateway_process

ENDS_S = 120.0  # usually a second or two; a busy test machine may stand still for a minute
ENDLESS = "600"  # as --exit-timeout: only something else can end the gateway


@contextlib.contextmanager
def stopping_gateway(
    engine: Path, server: RunningServer, log: Path, exit_timeout: str
) -> Iterator[tuple[subprocess.Popen[bytes], openai.OpenAI]]:
    more = ("--exit-timeout", exit_timeout)
    with (
        gateway_process(engine, server.grpc_url, log, *more) as (process, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        try:
            yield process, client
        finally:
            process.kill()


def begin_stream(client: openai.OpenAI, **fields: Any) -> Any:
    """Return a stream that has given its first chunk."""
    asked = {"model": MODEL, "messages": HELLO, **LONG, **fields}
    stream = client.chat.completions.create(**asked, stream=True)
    next(iter(stream))
    return stream


def access_lines(log: Path) -> list[dict[str, Any]]:
    lines = [line for line in log.read_text().splitlines() if "gateway.access" in line]
    return [json.loads(line[line.index("{") :]) for line in lines]


def raw_request(client: openai.OpenAI, head: str) -> socket.socket:
    """Send the head of a request, each line ended by a newline, and return the connection."""
    assert client.base_url.port is not None
    connection = socket.socket()
    connection.settimeout(ENDS_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", client.base_url.port))
    connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n")
    return connection


def read_all(connection: socket.socket) -> bytes:
    data = b""
    with connection:
        while chunk := connection.recv(1 << 16):
            data += chunk
    return data


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_what_still_runs_is_ended_in_words(
    engine: Path, server: RunningServer, tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "gateway.log"
    before = settled(server).get("requests_finished_total.cancelled", 0.0)
    with (
        stopping_gateway(engine, server, log, "0") as (process, client),
        ThreadPoolExecutor() as pool,
    ):
        upload = raw_request(client, "POST /v1/completions HTTP/1.1\nHost: x\nContent-Length: 9\n")
        ask = client.chat.completions.create
        whole = [
            pool.submit(ask, model=MODEL, messages=HELLO, n=n, **LONG)  # type: ignore[call-overload]
            for n in (1, 2)
        ]
        streams = [begin_stream(client, n=n) for n in (1, 2)]
        running = 6  # with the choices of both kinds; in the engine alone
        wait_until(lambda: metrics(server)["requests_active"] == running, ENDS_S, "all run")
        process.send_signal(number)
        for stream in streams:
            with pytest.raises(openai.APIError, match="shutting down") as broken:
                for chunk in stream:
                    assert chunk.choices[0].finish_reason is None
            assert (broken.value.code, broken.value.type) == ("shutting_down", "server_error")
        for future in whole:
            with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
                future.result()
            error = refused.value
            assert (error.status_code, error.code) == (503, "shutting_down")
            assert error.type == "server_error"
            assert error.response.headers["retry-after"] and error.response.headers["x-request-id"]
        answer = read_all(upload)
        assert answer.startswith(b"HTTP/1.1 503") and b'"shutting_down"' in answer
        assert process.wait(ENDS_S) == 0
    assert "Traceback" not in log.read_text()
    lines = access_lines(log)
    assert sorted(line["status"] for line in lines) == [200, 200, 503, 503, 503]
    assert {line["error"] for line in lines} == {"shutting_down"}
    assert not any("disconnected" in line for line in lines)
    wait_until(lambda: is_idle(server), ENDS_S, "the engine is idle")
    total = "requests_finished_total.cancelled"
    wait_until(lambda: metrics(server)[total] == before + running, ENDS_S, "all are cancelled")


def test_requests_that_run_may_finish_and_new_ones_are_not_taken(
    engine: Path, server: RunningServer, tmp_path: Path
) -> None:
    log = tmp_path / "gateway.log"
    with stopping_gateway(engine, server, log, ENDLESS) as (process, client):
        stream = begin_stream(client)
        process.send_signal(signal.SIGTERM)
        health = str(client.base_url).replace("/v1/", "/health")
        wait_until(lambda: not answers(health), ENDS_S, "no new connection is taken")
        assert process.poll() is None, "a request still runs"
        reasons = [chunk.choices[0].finish_reason for chunk in stream]
        assert reasons[-1] == "length"
        assert process.wait(ENDS_S) == 0
    assert "Traceback" not in log.read_text()
    (line,) = access_lines(log)
    assert (line["status"], line["finish_reasons"]) == (200, ["length"])


def test_a_second_ctrl_c_ends_at_once(engine: Path, server: RunningServer, tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    with stopping_gateway(engine, server, log, ENDLESS) as (process, client):
        stream = begin_stream(client)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: "to finish" in log.read_text(), ENDS_S, "it stops")
        process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert process.wait(ENDS_S) == 0
    assert "Traceback" not in log.read_text()


def test_a_client_that_does_not_read_holds_nobody_up(
    engine: Path, server: RunningServer, tmp_path: Path
) -> None:
    log = tmp_path / "gateway.log"
    body = json.dumps(
        {"model": MODEL, "messages": HELLO, "stream": True, "max_tokens": 4000, "logprobs": True}
        | {"top_logprobs": 20, "ignore_eos": True, "n": 8}
    )
    with stopping_gateway(engine, server, log, "0") as (process, client):
        head = "POST /v1/chat/completions HTTP/1.1\nHost: x\nContent-Type: application/json\n"
        connection = raw_request(client, f"{head}Content-Length: {len(body)}\n")
        with connection:
            connection.sendall(body.encode())
            assert connection.recv(1)
            wait_until(lambda: is_blocked(connection), ENDS_S, "the buffers are full")
            process.send_signal(signal.SIGTERM)
            assert process.wait(ENDS_S) == 0
    assert "Traceback" not in log.read_text()
    assert "timeout graceful shutdown" not in log.read_text(), "uvicorn had to cut it"
    assert [line["error"] for line in access_lines(log)] == ["shutting_down"]


def is_blocked(connection: socket.socket) -> bool:
    """Whether the other side has bytes to send, and for a second sent and added none."""
    port = f":{connection.getsockname()[1]:04X}"

    def waiting() -> int:
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        (queues,) = (fields[4] for fields in lines if fields[2].endswith(port))
        return int(queues.partition(":")[0], 16)

    before = waiting()
    time.sleep(1.0)
    return waiting() == before > 0
