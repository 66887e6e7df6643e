"""The model in a process of its own, below a real server: answers, errors and ends are the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from client.grpc_stream import GenerationError
from client.http_generate import generate_stream
from deepseek_triton.errors import ServerError
from deepseek_triton.server import RunningServer, running_server
from deepseek_triton.server.process_group import is_running, members
from tests.e2e.conftest import options
from tests.e2e.support import (
    NEVER,
    complete,
    concurrently,
    is_idle,
    metrics,
    processes_serving,
    raw_request,
    refusal,
    tensor,
    wait_until,
)
from tests.e2e.test_cancellation import leave_grpc_stream, pass_grpc_deadline

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}


@pytest.fixture
def own_engine(engine: Path, tmp_path: Path) -> Path:
    """A copy of the engine, so that processes that serve it are this test's own."""
    return Path(shutil.copytree(engine, tmp_path / "engine"))


@pytest.fixture(scope="module")
def own_server(engine: Path) -> Iterator[RunningServer]:
    wanted = options(engine, engine_process="own")
    with running_server(wanted, log_path=engine.with_name("own-server.log")) as running:
        yield running


def worker_of(server: RunningServer) -> int:
    """Return the process that has the model."""
    found = [
        pid
        for pid in members(server.pid)
        if b"engine_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(found) == 1
    return found[0]


def test_answers_are_those_of_an_engine_inside_the_server(
    server: RunningServer, own_server: RunningServer
) -> None:
    assert is_running(worker_of(own_server))
    requests = [
        partial(complete, prompt=f"{i} ships", max_tokens=60, temperature=1.0, seed=i,
                stream=bool(i % 3), return_log_probs=True)
        for i in range(24)
    ]  # fmt: skip
    there = concurrently([partial(call, own_server) for call in requests])
    here = concurrently([partial(call, server) for call in requests])
    assert [a.text for a in there] == [a.text for a in here]
    assert [a.finish_reason for a in there] == [a.finish_reason for a in here]
    wait_until(lambda: is_idle(own_server), 5.0, "the engine is idle")


def test_clients_that_leave_end_their_requests(own_server: RunningServer) -> None:
    leave_grpc_stream(own_server)
    pass_grpc_deadline(own_server, stream=False)
    answer = complete(
        own_server, "Hello", max_tokens=4000, end_id=NEVER, stop_words=["e", "a", " "]
    )
    assert answer.finish_reason == "stop"
    wait_until(lambda: is_idle(own_server), 3.0, "the engine is idle")


def test_an_answer_follows_its_schema(own_server: RunningServer) -> None:
    inputs = [
        tensor("text_input", "BYTES", ["Give me JSON"]),
        tensor("max_tokens", "INT32", [200]),
        tensor("stream", "BOOL", [False]),
        tensor("temperature", "FP32", [1.0]),
        tensor("seed", "UINT64", [7]),
        tensor("guided_decoding_guide_type", "BYTES", ["json_schema"]),
        tensor("guided_decoding_guide", "BYTES", [json.dumps(SCHEMA)]),
        tensor("exclude_input_in_output", "BOOL", [True]),
    ]
    answer = raw_request(own_server, inputs)
    (text,) = (array.reshape(-1)[0].decode() for array in answer.arrays("text_output"))
    assert set(json.loads(text)) == {"n", "kind"}


def test_a_broken_schema_and_a_bad_length_are_refused_by_name(own_server: RunningServer) -> None:
    request = {"text_input": ("BYTES", "Hello"), "max_tokens": ("INT32", 8)}
    broken = {
        "guided_decoding_guide_type": ("BYTES", "json_schema"),
        "guided_decoding_guide": ("BYTES", '{"type": "x"}'),
    }
    assert refusal(own_server, request | broken).startswith("guided_decoding_guide: not a usable")
    long = refusal(own_server, request | {"max_tokens": ("INT32", 1 << 20)})
    assert long.startswith("max_tokens: ")


def test_an_engine_that_does_not_load_says_the_same(own_engine: Path, tmp_path: Path) -> None:
    victim = max(own_engine.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    messages = []
    for where in ("own", "inline"):
        with pytest.raises(ServerError) as caught:  # noqa: SIM117
            with running_server(
                options(own_engine, engine_process=where), log_path=tmp_path / "log"
            ):
                pass
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "EngineMismatchError" in messages[0] and victim.name in messages[0]
    assert processes_serving(own_engine) == []


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_a_killed_engine_ends_its_requests_and_the_server(
    own_engine: Path, tmp_path: Path, busy: bool
) -> None:
    with running_server(
        options(own_engine, engine_process="own"), log_path=tmp_path / "log"
    ) as server:
        errors: list[str] = []

        def ask() -> None:
            with pytest.raises(GenerationError) as caught:
                complete(server, "Hello", max_tokens=4000, end_id=NEVER)
            errors.append(str(caught.value))

        threads = [threading.Thread(target=ask) for _ in range(3 if busy else 0)]
        for thread in threads:
            thread.start()
        running = len(threads)
        wait_until(lambda: metrics(server)["requests_active"] == running, 5.0, "the requests run")
        os.kill(worker_of(server), signal.SIGKILL)
        with pytest.raises(ServerError, match="model tensorrt_llm: its process died"):
            server.wait()
        for thread in threads:
            thread.join()
    assert len(errors) == len(threads)
    for error in errors:
        assert "the engine's process died (signal 9); restart the server" in error
    assert processes_serving(own_engine) == []


def test_killed_with_its_server_it_leaves_nothing(own_engine: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="ended with status -9"),
        running_server(
            options(own_engine, engine_process="own"), log_path=tmp_path / "log"
        ) as server,
    ):
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
    assert processes_serving(own_engine) == []


def test_a_stop_lets_a_running_request_end(own_engine: Path, tmp_path: Path) -> None:
    """Over HTTP: tritonserver closes gRPC streams at once."""
    reasons: list[str] = []

    def ask() -> None:
        chunks = generate_stream("Hello", url=server.http_url, max_tokens=200, end_id=NEVER)
        reasons.extend(chunk["finish_reason"] for chunk in chunks)

    with running_server(
        options(own_engine, engine_process="own"), log_path=tmp_path / "log"
    ) as server:
        worker = worker_of(server)
        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: not is_idle(server), 5.0, "the request runs")
        os.kill(worker, signal.SIGINT)
        os.kill(worker, signal.SIGTERM)
    thread.join()
    assert reasons[-1] == "length"
    assert not is_running(worker)
