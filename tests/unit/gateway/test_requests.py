"""What clients may send: what is refused, with which parameter and code."""

from __future__ import annotations

from typing import Any

import pytest

from deepseek_triton.gateway.triton import Piece
from tests.unit.gateway.fakes import FakeServer, chat, complete, events, final, post

USER = {"role": "user", "content": "Hi"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
TOOL = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "other": 1}}
LONE = "\ud800"

CHAT_ERRORS: list[tuple[dict[str, Any], str | None, str | None]] = [
    ({"foo": 1}, "foo", "unknown_parameter"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "Hi"}, "messages", "invalid_value"),
    ({"messages": [{**USER, "foo": 1}]}, "messages[0].foo", "unknown_parameter"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content", "missing_required_parameter"),
    ({"messages": [{"role": "king", "content": ""}]}, "messages[0]", "invalid_value"),
    ({"messages": [IMAGE]}, "messages[0].content[0].type", "invalid_value"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": LONE}]}, None, None),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"temperature": "1"}, "temperature", "invalid_value"),
    ({"temperature": True}, "temperature", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": 5.5}, "max_tokens", "invalid_value"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", None),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"stop": ["x"] * 65}, "stop", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", None),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", None),
    ({"stream": False, "stream_options": {}}, "stream_options", None),
    ({"stream_options": {"other": 1}}, "stream_options.other", "unknown_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
    ({"response_format": SCHEMA}, "response_format.json_schema.other", "unknown_parameter"),
    ({"tool_choice": "auto"}, "tool_choice", None),
    ({"tools": [{**TOOL, "type": "x"}]}, "tools[0].type", "invalid_value"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        None,
    ),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages", None),
    ({"chat_template_kwargs": {"unread": 1}}, "chat_template_kwargs.unread", None),
    ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
    ({"functions": [TOOL["function"]]}, "functions", "unsupported_parameter"),
    ({"store": True}, "store", "unsupported_parameter"),
    ({"model": "other"}, "model", "model_not_found"),
    ({"model": LONE}, "model", "model_not_found"),
    ({"model": None}, "model", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), CHAT_ERRORS, ids=lambda v: repr(v)[:60])
def test_what_cannot_be_done_is_refused_by_name(
    fields: dict[str, Any], param: str | None, code: str | None
) -> None:
    server = FakeServer()
    response = post(
        "/v1/chat/completions",
        encoded({"model": "m", "messages": [USER], **fields}),
        server,
        headers={"content-type": "application/json"},
    )
    error = response.json()["error"]
    assert response.status_code == (404 if code == "model_not_found" else 400), error
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert error["message"]
    assert server.calls == []


@pytest.mark.parametrize(
    ("stop", "said"),
    [(["x"] * 65, "at most 64"), ([5], "string"), (5, "string")],
)
def test_a_list_that_is_too_long_is_told_so(stop: object, said: str) -> None:
    message = chat(FakeServer(), stop=stop).json()["error"]["message"]
    assert message.startswith("stop") and said in message


@pytest.mark.parametrize("unknown", [10**6, 2**31 - 1])
def test_token_ids_that_are_nobodys_are_refused(unknown: int) -> None:
    response = post("/detokenize", {"tokens": [0, unknown]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tokens[1]")
    assert error["message"] == f"tokens: {unknown} is no token's id"


def encoded(body: dict[str, Any]) -> bytes:
    import json

    return json.dumps(body).encode()


NEUTRAL: list[dict[str, Any]] = [
    {"audio": None, "store": False, "service_tier": "auto", "functions": []},
    {"temperature": None, "n": None, "stop": None, "tools": None, "logit_bias": {}},
    {"user": "me", "safety_identifier": "x", "prompt_cache_key": "y"},
    {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
    {"response_format": {"type": "text"}, "stream_options": None},
]


@pytest.mark.parametrize("fields", NEUTRAL, ids=repr)
def test_values_that_ask_for_nothing_are_taken(fields: dict[str, Any]) -> None:
    response = chat(FakeServer(), **fields)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff", b"[" * 100_000, b'{"a":NaN}']
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    response = post("/v1/chat/completions", body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_an_assistant_message_with_calls_and_a_tools_answer_are_taken() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
    assert chat(FakeServer(), messages=messages).status_code == 200


def test_completions_number_their_choices_prompt_by_prompt() -> None:
    server = FakeServer([Piece("x"), final("y", "length", tokens=2)])
    content = complete(server, prompt=["a", "b"], n=2, echo=True).json()
    assert [(c["index"], c["text"]) for c in content["choices"]] == [
        (0, "axy"),
        (1, "axy"),
        (2, "bxy"),
        (3, "bxy"),
    ]
    assert content["usage"]["prompt_tokens"] == 10
    assert content["usage"]["completion_tokens"] == 8
    assert {call.inputs["max_tokens"] for call in server.calls} == {16}


def test_a_streamed_completion() -> None:
    parts = events(complete(FakeServer(), stream=True, echo=True))
    assert [part["choices"][0]["text"] for part in parts[:-1]] == ["HiHel", "lo"]
    assert parts[-1] == "[DONE]"


def test_a_prompt_of_token_ids_is_the_text_that_tokenizes_so() -> None:
    from tests.unit.gateway.fakes import MODEL

    ids = MODEL.tokenizer.encode("Hello there")
    server = FakeServer()
    assert complete(server, prompt=ids).status_code == 200
    assert MODEL.tokenizer.encode(server.calls[0].inputs["text_input"]) == ids
    for wrong in ([[*ids, 10**6]], [ids[1:]]):
        response = complete(FakeServer(), prompt=wrong)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"


def test_what_completions_lack_is_refused_by_name() -> None:
    for fields, param in (
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"prompt": []}, "prompt"),
    ):
        response = complete(FakeServer(), **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_embeddings_are_refused() -> None:
    error = post("/v1/embeddings", {"model": "m", "input": "x"}).json()["error"]
    assert "embeddings" in error["message"]


def test_tokenize_and_detokenize() -> None:
    found = post("/tokenize", {"prompt": "Hello"}).json()
    assert found["count"] == len(found["tokens"]) == 1 + len(found["tokens"][1:])
    text = post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"]
    assert text == "<｜begin▁of▁sentence｜>Hello"
    rendered = post("/tokenize", {"messages": [USER]}).json()["tokens"]
    assert rendered.count(found["tokens"][0]) == 1, "exactly one BOS"
    assert post("/detokenize", {"tokens": []}).json()["prompt"] == ""
    assert post("/tokenize", {}).status_code == 400
    for body in ({"prompt": LONE}, {"messages": [{**USER, "content": LONE}]}):
        refused = post("/tokenize", encoded(body), headers={"content-type": "application/json"})
        assert refused.status_code == 400 and "U+D800" in refused.json()["error"]["message"]
    assert post("/tokenize", {"prompt": "a", "messages": [USER]}).status_code == 400
