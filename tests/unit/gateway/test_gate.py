"""What every request passes, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from deepseek_triton.gateway.app import create_app
from deepseek_triton.gateway.config import GatewayOptions
from deepseek_triton.gateway.keys import new_key
from deepseek_triton.gateway.triton import Piece, ServerRefusal
from tests.unit.gateway.fakes import FOLDER, MODEL, FakeServer, chat, client, events, final, post

CHAT = {"model": "m", "messages": [{"role": "user", "content": "SECRET"}]}
JSON = {"content-type": "application/json"}


def test_request_ids_are_passed_on_and_made_up() -> None:
    server = FakeServer()
    response = post("/v1/chat/completions", CHAT, server, headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert server.calls[0].request_id == "abc-1/0"
    for wrong in ("a b", "x" * 200, ""):
        made = post("/v1/chat/completions", CHAT, headers={"x-request-id": wrong})
        assert len(made.headers["x-request-id"]) == 32
    assert post("/nowhere", {}).headers["x-request-id"]


def test_a_body_that_is_too_large_is_refused(tmp_path: Path) -> None:
    response = post("/v1/chat/completions", CHAT, max_body_bytes=20)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")

    async def chunked() -> Any:
        async def body() -> Any:
            for _ in range(10):
                yield b" " * 10

        async with client(FakeServer(), max_body_bytes=50) as http:
            return await http.post("/v1/chat/completions", content=body(), headers=JSON)

    assert asyncio.run(chunked()).status_code == 413


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def slow() -> Any:
        async def body() -> Any:
            yield b" "
            await asyncio.sleep(30)

        async with client(FakeServer(), body_timeout_s=0.1) as http:
            return await http.post("/v1/chat/completions", content=body(), headers=JSON)

    assert asyncio.run(slow()).status_code == 408


def test_keys_guard_what_costs_something(tmp_path: Path) -> None:
    key, entry = new_key("team")
    path = tmp_path / "keys"
    path.write_text(json.dumps({"keys": [{**entry, "requests_per_minute": 2}]}))
    server = FakeServer()

    async def statuses() -> list[int]:
        async with client(server, key_file=path) as http:
            good = {"authorization": f"Bearer {key}"}
            found = [
                await http.get("/health"),
                await http.get("/v1/models"),
                await http.post("/tokenize", json={"prompt": "a"}),
                await http.post("/v1/chat/completions", json=CHAT),
                await http.post("/v1/chat/completions", json=CHAT, headers=good),
                await http.get("/v1/models", headers=good),
                await http.get("/v1/models", headers=good),
            ]
            assert found[-1].headers["retry-after"]
            assert found[3].json()["error"]["code"] == "invalid_api_key"
            return [response.status_code for response in found]

    assert asyncio.run(statuses()) == [200, 401, 401, 401, 200, 200, 429]
    assert len(server.calls) == 1


def test_the_log_line_has_numbers_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("deepseek_triton")
    logger.propagate = True
    with caplog.at_level(logging.INFO, "deepseek_triton"):
        post("/v1/chat/completions", CHAT, FakeServer([final("ANSWER", "length", 3)]))
        post("/v1/chat/completions", {**CHAT, "foo": 1}, FakeServer())
    messages = [r.message for r in caplog.records if r.name.endswith("access")]
    # An earlier test may have left a second handler, which sees each line again.
    lines = [json.loads(message) for message in dict.fromkeys(messages)]
    assert lines[0]["status"] == 200
    assert lines[0]["finish_reasons"] == ["length"]
    assert (lines[0]["prompt_tokens"], lines[0]["completion_tokens"]) == (5, 3)
    assert lines[0]["first_token_seconds"] <= lines[0]["seconds"]
    assert (lines[1]["status"], lines[1]["error"]) == (400, "unknown_parameter")
    assert "SECRET" not in caplog.text and "ANSWER" not in caplog.text


def test_pages_of_other_origins_are_let_in_only_if_named() -> None:
    headers = {"origin": "http://page", "access-control-request-method": "POST"}

    async def preflight(**options: Any) -> Any:
        async with client(FakeServer(), **options) as http:
            return await http.options("/v1/chat/completions", headers=headers)

    assert "access-control-allow-origin" not in asyncio.run(preflight()).headers
    allowed = asyncio.run(preflight(cors_origins=("http://page",)))
    assert allowed.headers["access-control-allow-origin"] == "http://page"
    other = asyncio.run(preflight(cors_origins=("http://other",)))
    assert "access-control-allow-origin" not in other.headers


def test_readiness_follows_the_servers() -> None:
    async def status(*servers: FakeServer) -> tuple[int, int]:
        async with client(*servers) as http:
            return (await http.get("/health")).status_code, (await http.get("/ready")).status_code

    assert asyncio.run(status(FakeServer(ready=False), FakeServer(url="b:1"))) == (200, 200)
    assert asyncio.run(status(FakeServer(ready=False))) == (200, 503)


def test_metrics_count_what_happened() -> None:
    async def scrape() -> str:
        async with client(FakeServer([final("x", tokens=4)])) as http:
            await http.post("/v1/chat/completions", json=CHAT)
            await http.post("/v1/chat/completions", json={**CHAT, "foo": 1})
            await http.get("/made/up/path")
            return (await http.get("/metrics")).text

    text = asyncio.run(scrape())
    prefix = "deepseek_triton_gateway_"
    for line in (
        f'{prefix}requests_total{{route="/v1/chat/completions",status="200"}} 1',
        f'{prefix}requests_total{{route="/v1/chat/completions",status="400"}} 1',
        f'{prefix}requests_total{{route="other",status="404"}} 1',
        f"{prefix}completion_tokens_total 4",
        f"{prefix}prompt_tokens_total 5",
        f"{prefix}cached_tokens_total 4",
        f'{prefix}server_ready{{server="fake:1"}} 1',
        f"{prefix}first_token_seconds_count 1",
        f'{prefix}first_token_seconds_bucket{{le="+Inf"}} 1',
    ):
        assert line in text.splitlines()


async def leave_after(
    server: FakeServer, body: dict[str, Any], seconds: float, *, stuck_at: int = 0
) -> list[Any]:
    """Send a request as an HTTP server does, and leave; return what was answered.

    The client stops reading at body `stuck_at`, counted from 1; 0: never.
    """
    app = create_app(GatewayOptions(FOLDER, servers=(server.url,)), MODEL, [server])  # type: ignore[list-item]
    sent: list[Any] = []
    arrived: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    arrived.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "scheme": "http",
    }

    async def send(message: Any) -> None:
        sent.append(message)
        if stuck_at and sum(m["type"] == "http.response.body" for m in sent) == stuck_at:
            await asyncio.sleep(3600)

    async with app.router.lifespan_context(app):
        running = asyncio.create_task(app(scope, arrived.get, send))
        await asyncio.sleep(seconds)
        assert not running.done()
        arrived.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(running, 5.0)
    return sent


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [[None], [Piece("a"), None]], ids=["before", "after"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_cancels_its_request(stream: bool, script: list[Any], n: int) -> None:
    server = FakeServer(script)
    asyncio.run(leave_after(server, {**CHAT, "stream": stream, "n": n}, 0.1))
    assert server.cancelled == n
    assert server.in_flight == 0


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("busy", [False, True], ids=["waiting", "sending"])
def test_tokens_that_were_sent_before_a_client_left_are_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, n: int, busy: bool
) -> None:
    monkeypatch.setattr(logging.getLogger("deepseek_triton"), "propagate", True)
    texts = ["def", " add", "(a", ", b):"]
    script: list[Any] = [*map(Piece, texts), None]
    body = {**CHAT, "stream": True, "n": n}
    with caplog.at_level(logging.INFO, "deepseek_triton"):
        asyncio.run(leave_after(FakeServer(script), body, 0.1, stuck_at=len(texts) * n * busy))
    (line,) = {r.message for r in caplog.records if r.name.endswith("access")}
    counted = json.loads(line)
    assert counted["completion_tokens"] == n * MODEL.count("".join(texts)) > 3 * n
    assert counted["disconnected"] and "prompt_tokens" not in counted


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_an_unforeseen_error_is_an_answer_too(
    caplog: pytest.LogCaptureFixture, n: int, stream: bool
) -> None:
    logging.getLogger("deepseek_triton").propagate = True
    with caplog.at_level(logging.INFO, "deepseek_triton"):
        response = chat(FakeServer([RuntimeError("SECRET")]), n=n, stream=stream)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert "SECRET" not in response.text
    assert response.headers["x-request-id"] in caplog.text
    (line,) = {r.message for r in caplog.records if r.name.endswith("access")}
    assert (json.loads(line)["status"], json.loads(line)["error"]) == (500, "internal_error")
    causes = {r.message for r in caplog.records if r.exc_info and "SECRET" in str(r.exc_info[1])}
    assert len(causes) == 1, "the log has the cause"


@pytest.mark.parametrize("n", [1, 2])
def test_an_unforeseen_error_in_a_stream_is_its_last_event(n: int) -> None:
    parts = events(chat(FakeServer([Piece("a"), RuntimeError("SECRET")]), n=n, stream=True))
    assert parts[-1]["error"]["code"] == "internal_error"
    assert all("choices" in part for part in parts[:-1]) and len(parts) > 1
    assert "SECRET" not in json.dumps(parts)


def test_a_servers_refusal_without_a_field_is_its_own_fault() -> None:
    response = chat(FakeServer([ServerRefusal("x")]))
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
