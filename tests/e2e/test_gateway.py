"""OpenAI's API in front of a real server, through clients that we did not write."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from deepseek_triton.server import RunningServer
from deepseek_triton.server.ports import resolve_ports
from tests.e2e.support import is_idle, metrics, settled, wait_until

MODEL = "checkpoint"  # the folder's name
WITHIN_S = 2.0  # usually about 0.2 s; a busy test machine takes longer
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
LONG: dict[str, Any] = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "celsius": {"type": "boolean"}},
            "required": ["city", "celsius"],
            "additionalProperties": False,
        },
    },
}


class Report(BaseModel):
    sky: Literal["clear", "cloudy"]
    warm: bool


@contextlib.contextmanager
def running_gateway(engine: Path, servers: str, log_path: Path, *more: str) -> Iterator[str]:
    """Run the gateway as `make gateway` does; yield its address."""
    with gateway_process(engine, servers, log_path, *more) as (_, url):
        yield url


@contextlib.contextmanager
def gateway_process(
    engine: Path, servers: str, log_path: Path, *more: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run the gateway in the same way; yield its process as well."""
    port = resolve_ports("127.0.0.1", {"gateway": 0})["gateway"]
    command = [sys.executable, "-m", "deepseek_triton.gateway", "--engine", str(engine)]
    command += ["--triton", servers, "--gateway-port", str(port), *more]
    with log_path.open("w") as log, subprocess.Popen(command, stderr=log) as gateway:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: answers(f"{url}/ready"), 60.0, "the gateway is ready")
            yield gateway, url
        finally:
            gateway.terminate()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def address(engine: Path, shared_server: RunningServer) -> Iterator[str]:
    log_path = engine.with_name("gateway.log")
    with running_gateway(engine, shared_server.grpc_url, log_path) as url:
        yield url


@pytest.fixture
def client(address: str, server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_stream_adds_up_to_the_whole_answer_and_usage_is_exact(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 40, "seed": 7}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert not any(reasons[:-1])
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    prompt = client.post("../tokenize", cast_to=httpx.Response, body={"messages": HELLO}).json()
    assert whole.usage.prompt_tokens == prompt["count"]
    if whole.choices[0].finish_reason == "length":
        assert whole.usage.completion_tokens == 40


def test_text_completions(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "One, two", "max_tokens": 12, "seed": 1}
    whole = client.completions.create(**asked, logprobs=2)
    (choice,) = whole.choices
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert whole.usage is not None
    assert len(choice.logprobs.token_logprobs) == whole.usage.completion_tokens
    assert all(value <= 0 for value in choice.logprobs.token_logprobs)
    streamed = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text
    cut = client.completions.create(**{**asked, "seed": 1}, stop=choice.text[5:8])
    assert cut.choices[0].text == choice.text[: choice.text.index(choice.text[5:8])]
    assert cut.choices[0].finish_reason == "stop"


def test_log_probs_and_bias(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 5, "temperature": 0}
    (choice,) = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-5)
    biased = client.chat.completions.create(**asked, logit_bias={"70": 100})
    wanted = client.post("../detokenize", cast_to=httpx.Response, body={"tokens": [70] * 5})
    assert biased.choices[0].message.content == wanted.json()["prompt"]


def test_several_choices_differ(client: openai.OpenAI) -> None:
    content = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=16, n=3, seed=5, temperature=1.0
    )
    texts = [choice.message.content for choice in content.choices]
    assert len(set(texts)) == 3
    again = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=16, n=1, seed=6, temperature=1.0
    )
    assert again.choices[0].message.content == texts[1]


def test_concurrent_streams_are_what_they_are_alone(address: str, server: RunningServer) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=24, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            together = await asyncio.gather(*(ask(client, seed) for seed in range(8)))
            return list(together), [await ask(client, seed) for seed in range(8)]

    together, alone = asyncio.run(run())
    assert together == alone
    assert len(set(together)) == 8


def test_answers_follow_a_schema(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=MODEL, messages=HELLO, max_tokens=300, response_format=Report
    )
    assert isinstance(parsed.choices[0].message.parsed, Report)
    whole = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=64,
        seed=3,
        response_format={"type": "json_object"},
    )
    content = whole.choices[0].message.content or ""
    assert content.startswith("{")
    if whole.choices[0].finish_reason == "stop":
        json.loads(content)


def test_required_tools_are_called_as_declared(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": HELLO,
        "max_tokens": 400,
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": 2,
    }
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather"
    assert arguments["city"] in ("Paris", "Rome") and isinstance(arguments["celsius"], bool)
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    (streamed,) = final.choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments
    messages = [*HELLO, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "dry"}]
    refused = pytest.raises(openai.BadRequestError)  # this checkpoint's template knows no tools
    with refused as caught:
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    assert caught.value.param == "messages"


def test_langchain(address: str, server: RunningServer) -> None:
    chat = ChatOpenAI(
        model=MODEL, base_url=f"{address}/v1", api_key="none", max_completion_tokens=300, seed=4
    )
    whole = chat.invoke("Hello", max_tokens=20)
    streamed = list(chat.stream("Hello", max_tokens=20))
    assert "".join(str(chunk.content) for chunk in streamed) == whole.content
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] <= 20
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(Report, method=method).invoke("Hello")
        assert isinstance(found, Report), method

    @tool
    def ask(question: Literal["why", "how"]) -> str:
        """Ask."""
        return question

    bound = chat.bind_tools([ask], tool_choice="any", strict=True, parallel_tool_calls=False)
    (call,) = bound.invoke("Hello").tool_calls
    assert call["name"] == "ask" and call["args"]["question"] in ("why", "how")


def test_errors_reach_the_client_with_their_parameter(client: openai.OpenAI) -> None:
    def refused(**fields: Any) -> openai.BadRequestError:
        asked = {"model": MODEL, "messages": HELLO, **fields}
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**asked)
        return caught.value

    for stream in (False, True):
        too_long = refused(max_tokens=10**6, stream=stream)
        assert (too_long.param, too_long.code) == ("max_tokens", "context_length_exceeded")
    assert refused(messages=[{"role": "user", "content": "word " * 5000}]).code == (
        "context_length_exceeded"
    )
    unknown_token = refused(logit_bias={"99999": 1})
    assert unknown_token.param == "logit_bias"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}}
    assert refused(response_format=schema).param == "response_format"
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model=MODEL, input="x")
    assert client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_ends_its_request_in_the_engine(
    client: openai.OpenAI, server: RunningServer, stream: bool
) -> None:
    def cancelled() -> float:
        return metrics(server).get("requests_finished_total.cancelled", 0.0)

    settled(server)
    before = cancelled()
    if stream:
        chunks = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **LONG)
        for _, _ in zip(range(3), chunks, strict=False):
            pass
        chunks.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(model=MODEL, messages=HELLO, timeout=0.7, **LONG)
    wait_until(lambda: is_idle(server), WITHIN_S, "the engine is idle")
    wait_until(lambda: cancelled() == before + 1, WITHIN_S, "it is counted as cancelled")


def test_keys_and_a_server_that_is_not_there(
    engine: Path, server: RunningServer, tmp_path: Path
) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "deepseek_triton.gateway", "--new-key", "team"],
        check=True,
        capture_output=True,
        text=True,
    )
    key, entry = (line.partition(": ")[2] for line in made.stdout.splitlines())
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{**json.loads(entry), "requests_per_minute": 2}]}))
    missing = f"127.0.0.1:{resolve_ports('127.0.0.1', {'none': 0})['none']}"
    servers = f"{missing},{server.grpc_url}"
    with running_gateway(
        engine, servers, tmp_path / "gateway.log", "--api-keys", str(keys), "--model-name", "named"
    ) as url:
        wrong = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        right = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        for _ in range(2):
            right.chat.completions.create(model="named", messages=HELLO, max_tokens=2)
        with pytest.raises(openai.RateLimitError) as caught:
            right.chat.completions.create(model="named", messages=HELLO, max_tokens=2)
        assert int(caught.value.response.headers["retry-after"]) >= 1
    log = (tmp_path / "gateway.log").read_text()
    assert key not in log and "Hello" not in log
