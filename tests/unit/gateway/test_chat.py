from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from deepseek_triton.gateway.triton import Piece, ServerRefusal
from deepseek_triton.text.tool_calls import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
)
from tests.unit.gateway.fakes import MODEL, PLAIN_MODEL, FakeServer, chat, events, final

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = f'{CALLS_BEGIN}{CALL_BEGIN}f{SEPARATOR}{{"a": 1}}{CALL_END}{CALLS_END}'


def answer(*script: Any, **fields: Any) -> dict[str, Any]:
    response = chat(FakeServer(script), **fields)
    assert response.status_code == 200, response.text
    content: dict[str, Any] = response.json()
    return content


def test_a_whole_answer() -> None:
    content = answer(final("Hello", tokens=3))
    (choice,) = content["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert content["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_a_streamed_answer() -> None:
    parts = events(chat(FakeServer([Piece("Hel"), Piece(""), final("lo", "length")]), stream=True))
    assert parts[-1] == "[DONE]"
    assert [part["choices"][0]["delta"] for part in parts[:-1]] == [
        {"role": "assistant", "content": "Hel"},
        {"content": "lo"},
    ]
    assert [part["choices"][0]["finish_reason"] for part in parts[:-1]] == [None, "length"]
    assert not any("usage" in part for part in parts[:-1])


def test_usage_comes_at_the_end_of_a_stream_when_asked_for() -> None:
    options = {"include_usage": True}
    parts = events(chat(FakeServer(), stream=True, stream_options=options))
    assert [part["usage"] for part in parts[:-2]] == [None] * (len(parts) - 2)
    assert parts[-2]["choices"] == []
    assert parts[-2]["usage"]["total_tokens"] == 7


def test_an_error_before_the_first_token_has_its_status_also_for_a_stream() -> None:
    refusal = ServerRefusal("in ensemble 'ensemble', max_tokens: too many; context limit")
    for stream in (False, True):
        response = chat(FakeServer([refusal]), stream=stream)
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["param"] == "max_tokens"
        assert error["code"] == "context_length_exceeded"
        assert error["type"] == "invalid_request_error"


def test_an_error_inside_a_stream_is_an_event_and_no_done_follows() -> None:
    script = [Piece("Hel"), Piece("", "error"), ServerRefusal("it broke")]
    parts = events(chat(FakeServer(script), stream=True))
    assert parts[0]["choices"][0]["delta"]["content"] == "Hel"
    assert parts[-1]["error"]["message"] == "it broke"
    assert not any(part.get("choices", [{}])[0].get("finish_reason") for part in parts)


def test_a_deadline_that_the_engine_kept_is_an_error() -> None:
    response = chat(FakeServer([final("Hel", "cancelled")]))
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")


@pytest.mark.parametrize("size", [1, 2, 4, 100])
def test_reasoning_is_apart_from_content(size: int) -> None:
    text = "It is 2.\n</think>\n\n2"
    pieces = [Piece(text[i : i + size]) for i in range(0, len(text), size)]
    options = {"thinking": True}
    message = answer(*pieces, final(""), chat_template_kwargs=options)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("It is 2.", "2")
    response = chat(FakeServer([*pieces, final("")]), stream=True, chat_template_kwargs=options)
    deltas = [part["choices"][0]["delta"] for part in events(response)[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "It is 2."
    assert "".join(delta.get("content", "") for delta in deltas) == "2"


def test_an_answer_cut_inside_its_reasoning_has_no_content() -> None:
    content = answer(final("Let me see", "length"), chat_template_kwargs={"thinking": True})
    (choice,) = content["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["reasoning_content"] == "Let me see"
    assert choice["message"]["content"] == ""


def test_tool_calls_of_a_whole_answer() -> None:
    (choice,) = answer(Piece("I look."), final(CALL), tools=TOOLS)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": '{"a": 1}'})
    assert choice["message"]["content"] == "I look."


def test_tool_calls_of_a_stream() -> None:
    pieces = [Piece(CALL[i : i + 3]) for i in range(0, len(CALL), 3)]
    parts = events(chat(FakeServer([*pieces, final("")]), tools=TOOLS, stream=True))
    deltas = [
        call for part in parts[:-1] for call in part["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert deltas[0]["function"]["name"] == "f"
    assert deltas[0]["type"] == "function" and deltas[0]["id"]
    assert all(delta["index"] == 0 and "id" not in delta for delta in deltas[1:])
    assert "".join(delta["function"]["arguments"] for delta in deltas) == '{"a": 1}'
    assert parts[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_calls_of_an_answer_that_was_cut_are_not_called_complete() -> None:
    (choice,) = answer(final(CALL[:-20], "length"), tools=TOOLS)["choices"]
    assert choice["finish_reason"] == "length"


def test_tags_are_text_when_there_are_no_tools() -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = answer(final(CALL), **more)["choices"]
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"


def test_several_choices_have_seeds_of_their_own_and_usage_counts_the_prompt_once() -> None:
    server = FakeServer([final("x", tokens=2)])
    content = chat(server, n=3, seed=-1).json()
    assert [choice["index"] for choice in content["choices"]] == [0, 1, 2]
    assert content["usage"]["prompt_tokens"] == 5
    assert content["usage"]["completion_tokens"] == 6
    assert [call.inputs["seed"] for call in server.calls] == [2**64 - 1, 0, 1]
    assert len({call.request_id for call in server.calls}) == 3


def test_log_probs_are_those_of_each_token() -> None:
    ids = MODEL.tokenizer.encode("ab é")[1:]
    values = np.linspace(-2, -1, len(ids), dtype=np.float32)
    arrays = {
        "output_token_ids": np.array(ids, np.int32),
        "output_log_probs": values,
        "top_token_ids": np.array([[i, 0] for i in ids], np.int32).reshape(-1),
        "top_log_probs": np.array([[v, -9] for v in values], np.float32).reshape(-1),
    }
    server = FakeServer([final("ab é", **arrays)])
    (choice,) = chat(server, logprobs=True, top_logprobs=2).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "ab é"
    assert [entry["logprob"] for entry in entries] == values.tolist()
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert all(e["top_logprobs"][0]["token"] == e["token"] for e in entries)
    assert server.calls[0].parameters["top_log_probs"] == 2


def test_what_is_asked_of_the_server() -> None:
    server = FakeServer()
    response = chat(
        server,
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        stop=["a", "b"],
        presence_penalty=1,
        logit_bias={"5": -100},
        user="u",
    )
    assert response.status_code == 200
    (call,) = server.calls
    assert call.inputs == {
        "text_input": "<｜begin▁of▁sentence｜><user>Hi<｜Assistant｜></think>",
        "max_tokens": 7,
        "stream": False,
        "exclude_input_in_output": True,
        "return_perf_metrics": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 1.0,
        "stop_words": ["a", "b"],
    }
    assert json.loads(call.parameters["logit_bias"]) == {"5": -100}
    assert "clip_max_tokens" not in call.parameters
    open_ended = FakeServer()
    chat(open_ended)
    assert open_ended.calls[0].parameters["clip_max_tokens"] is True


def test_parts_of_content_are_joined_and_developer_means_system() -> None:
    server = FakeServer()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]
    chat(server, messages=messages)
    assert "<system>s<user>ab" in server.calls[0].inputs["text_input"]


def test_a_model_without_a_chat_template_refuses_conversations() -> None:
    response = chat(FakeServer(), model=PLAIN_MODEL)
    assert response.status_code == 400
    assert "/v1/completions" in response.json()["error"]["message"]
