"""Clients that go away: the engine ends their requests and frees their KV blocks."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from client.grpc_stream import GenerationError, stream_grpc
from client.http_generate import generate_stream
from deepseek_triton.server import RunningServer
from tests.e2e.conftest import SHORT_DEADLINE_MS
from tests.e2e.support import (
    NEVER,
    complete,
    concurrently,
    is_idle,
    metrics,
    settled,
    wait_until,
)

WITHIN_S = 2.0  # usually about 0.2 s; a busy test machine takes longer
LONG: dict[str, Any] = {"max_tokens": 4000, "end_id": NEVER}


def cancelled(server: RunningServer) -> float:
    return metrics(server).get("requests_finished_total.cancelled", 0.0)


def cancelled_before(server: RunningServer) -> float:
    return settled(server).get("requests_finished_total.cancelled", 0.0)


def is_running(server: RunningServer) -> bool:
    now = metrics(server)
    return now["requests_active"] > 0 and now["kv_blocks_used"] > 0


def leave_grpc_stream(server: RunningServer) -> None:
    stream = stream_grpc("Hello", url=server.grpc_url, **LONG)
    for _ in range(5):
        next(stream)
    wait_until(lambda: is_running(server), 2.0, "the request shows in the metrics")
    stream.close()


def leave_grpc_stream_before_its_first_token(server: RunningServer) -> None:
    from client.grpc_stream import make_input
    from tests.e2e.support import triton

    client = triton.InferenceServerClient(server.grpc_url)
    client.start_stream(lambda result, error: None)
    values = {"text_input": "word " * 3000, "max_tokens": 500, "stream": False}
    client.async_stream_infer("ensemble", [make_input(*item) for item in values.items()])
    wait_until(lambda: is_running(server), 5.0, "the request shows in the metrics")
    client.stop_stream(cancel_requests=True)
    client.close()


def pass_grpc_deadline(server: RunningServer, stream: bool) -> None:
    with pytest.raises(GenerationError) as caught:
        complete(server, "Hello", stream=stream, timeout_s=0.8, **LONG)
    assert caught.value.status == "StatusCode.DEADLINE_EXCEEDED"


def leave_http_stream(server: RunningServer) -> None:
    stream = generate_stream("Hello", url=server.http_url, **LONG)
    for _ in range(5):
        next(stream)
    wait_until(lambda: is_running(server), 2.0, "the request shows in the metrics")
    stream.close()


@pytest.mark.parametrize(
    "leave",
    [
        leave_grpc_stream,
        leave_grpc_stream_before_its_first_token,
        partial(pass_grpc_deadline, stream=True),
        partial(pass_grpc_deadline, stream=False),
        leave_http_stream,
    ],
    ids=["grpc cancel", "grpc cancel early", "deadline streamed", "deadline whole", "http close"],
)
def test_the_request_ends_within_a_second(
    server: RunningServer, leave: Callable[[RunningServer], None]
) -> None:
    before = cancelled_before(server)
    leave(server)
    wait_until(lambda: is_idle(server), WITHIN_S, "the engine is idle")
    wait_until(lambda: cancelled(server) == before + 1, WITHIN_S, "it is counted as cancelled")


def test_many_clients_leaving_at_once_leave_nothing(server: RunningServer) -> None:
    """More than run at the same time, so that some leave while they wait."""
    before = cancelled_before(server)
    streams = [stream_grpc("Hello", url=server.grpc_url, **LONG) for _ in range(12)]
    concurrently([partial(next, stream) for stream in streams])
    concurrently([partial(pass_grpc_deadline, server, stream=bool(i % 2)) for i in range(12)])
    concurrently([stream.close for stream in streams])
    wait_until(lambda: is_idle(server), 2 * WITHIN_S, "the engine is idle")
    # On a busy machine a deadline may pass before its request reaches the engine.
    wait_until(lambda: cancelled(server) >= before + 12, WITHIN_S, "the streams are cancelled")


def test_a_neighbour_of_a_cancelled_request_is_untouched(server: RunningServer) -> None:
    request = {"max_tokens": 100, "temperature": 1.0, "seed": 1, "end_id": NEVER}
    alone = complete(server, "Once upon a time", **request).text
    together, _ = concurrently(
        [
            partial(complete, server, "Once upon a time", **request),
            partial(leave_grpc_stream, server),
        ]
    )
    assert together.text == alone


def hang_up_on_generate(server: RunningServer, **fields: Any) -> None:
    """Send a non-streaming generate and close the connection without waiting for the answer."""
    body = {"text_input": "Hello", "stream": False, **LONG, **fields}
    connection = http.client.HTTPConnection(server.http_url)
    connection.request("POST", "/v2/models/ensemble/generate", json.dumps(body))
    wait_until(lambda: is_running(server), 2.0, "the request shows in the metrics")
    connection.close()


def test_hanging_up_on_generate_is_bounded_by_the_requests_own_deadline(
    server: RunningServer,
) -> None:
    """tritonserver never reports this disconnect, so that a deadline alone ends the work."""
    before = cancelled_before(server)
    start = time.monotonic()
    hang_up_on_generate(server, deadline_ms=700)
    wait_until(lambda: is_idle(server), 0.7 + WITHIN_S, "the engine is idle")
    assert time.monotonic() - start >= 0.6
    wait_until(lambda: cancelled(server) == before + 1, WITHIN_S, "it is counted as cancelled")


def test_a_request_without_a_deadline_gets_the_servers(small_server: RunningServer) -> None:
    before = cancelled_before(small_server)
    # Few enough tokens for the small pool, sent so often that the deadline comes first.
    answers = concurrently(
        [
            partial(complete, small_server, "Hello", max_tokens=300, end_id=NEVER, stream=False)
            for _ in range(16)
        ]
    )
    reasons = [answer.finish_reason for answer in answers]
    assert set(reasons) <= {"cancelled", "length"}
    assert "cancelled" in reasons
    expected = before + reasons.count("cancelled")
    wait_until(lambda: cancelled(small_server) == expected, WITHIN_S, "all of them are counted")
    wait_until(lambda: is_idle(small_server), SHORT_DEADLINE_MS / 1e3, "the engine is idle")
