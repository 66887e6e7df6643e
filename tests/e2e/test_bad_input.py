"""Requests that can never succeed: an answer naming the field, and the next request works."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from client import http_generate
from client.grpc_stream import make_input
from deepseek_triton.server import RunningServer
from deepseek_triton.text.tokenizer import Tokenizer
from tests.e2e.support import complete, engine_request, metrics, raw_request, tensor

INVALID = "StatusCode.INVALID_ARGUMENT"
CONTEXT = 4096  # of the checkpoint
VOCABULARY = 4096


@pytest.fixture(autouse=True)
def next_request_works(server: RunningServer) -> Iterator[None]:
    before = complete(server, "Hello", max_tokens=4)
    yield
    assert complete(server, "Hello", max_tokens=4).text == before.text


def send(server: RunningServer, *extra: Any, **values: Any) -> tuple[str, str]:
    """Status and message of the error that a request gets."""
    values = {"text_input": "Hello", "max_tokens": 4, "stream": True, **values}
    replaced = {item.name() for item in extra}
    inputs = [make_input(*item) for item in values.items() if item[0] not in replaced]
    return raw_request(server, [*inputs, *extra]).error


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("max_tokens", [0, -1, -(2**31)])
def test_max_tokens_below_one(server: RunningServer, max_tokens: int, stream: bool) -> None:
    status, message = send(server, max_tokens=max_tokens, stream=stream)
    assert status == INVALID
    assert "max_tokens" in message and str(max_tokens) in message


@pytest.mark.parametrize("stream", [True, False])
def test_an_empty_prompt(server: RunningServer, stream: bool) -> None:
    status, message = send(server, text_input="", stream=stream)
    assert status == INVALID
    assert "text_input" in message


def test_a_prompt_of_one_space_is_a_prompt(server: RunningServer) -> None:
    answer = complete(server, " ", max_tokens=4, min_tokens=4)
    assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    ("field", "value"), [("max_tokens", 0), ("max_tokens", -1), ("text_input", "")]
)
def test_over_http_these_are_status_400(server: RunningServer, field: str, value: Any) -> None:
    request: dict[str, Any] = {"prompt": "Hello", "max_tokens": 4}
    request["prompt" if field == "text_input" else field] = value
    for send_request in (
        http_generate.generate,
        lambda **k: list(http_generate.generate_stream(**k)),
    ):
        with pytest.raises(http_generate.GenerationError, match=field) as caught:
            send_request(url=server.http_url, **request)
        assert caught.value.status == 400


def test_prompt_and_max_tokens_over_the_limit_name_both_and_the_limit(
    server: RunningServer, tokenizer: Tokenizer
) -> None:
    length = len(tokenizer.encode("Hello"))
    status, message = send(server, max_tokens=CONTEXT - length + 1)
    assert status == INVALID
    for number in (length, CONTEXT - length + 1, CONTEXT):
        assert str(number) in message
    status, message = send(server, text_input="word " * 3 * CONTEXT)
    assert status == INVALID
    assert str(CONTEXT) in message


def test_a_prompt_that_is_not_utf8(server: RunningServer) -> None:
    status, message = send(server, tensor("text_input", "BYTES", [b"\xff\xfe\xfa"]))
    assert status == INVALID
    assert "text_input" in message and "UTF-8" in message


@pytest.mark.parametrize(
    "wrong",
    [
        tensor("max_tokens", "FP32", [4.0]),
        tensor("max_tokens", "INT64", [4]),
        tensor("max_tokens", "INT32", [4, 4]),
        tensor("max_tokens", "INT32", [4], shape=[1]),
        tensor("temperature", "FP32", [0.1, 0.2]),
        tensor("text_input", "INT32", [1]),
        tensor("stream", "INT32", [1]),
    ],
    ids=lambda t: f"{t.name()}-{t.datatype()}-{t.shape()}",
)
def test_a_wrong_dtype_or_shape_names_the_tensor(server: RunningServer, wrong: Any) -> None:
    _, message = send(server, wrong)
    assert wrong.name() in message


def test_two_prompts_in_one_request(server: RunningServer) -> None:
    inputs = [
        tensor("text_input", "BYTES", [b"one", b"two"], shape=[2, 1]),
        tensor("max_tokens", "INT32", [3, 5], shape=[2, 1]),
    ]
    status, message = raw_request(server, inputs).error
    assert status == INVALID
    assert "one prompt" in message


@pytest.mark.parametrize("missing", ["text_input", "max_tokens"])
def test_a_missing_required_tensor_is_named(server: RunningServer, missing: str) -> None:
    values = {"text_input": "Hello", "max_tokens": 4}
    del values[missing]
    answer = raw_request(server, [make_input(*item) for item in values.items()])
    assert missing in answer.error[1]


UNSUPPORTED = [
    tensor("beam_width", "INT32", [2]),
    tensor("num_return_sequences", "INT32", [2]),
    tensor("bad_words", "BYTES", [b"foo"]),
    tensor("length_penalty", "FP32", [2.0]),
    tensor("return_context_logits", "BOOL", [True]),
    tensor("return_generation_logits", "BOOL", [True]),
    tensor("embedding_bias_words", "BYTES", [b"foo"]),
    tensor("lora_task_id", "UINT64", [3]),
    tensor("guided_decoding_guide_type", "BYTES", [b"json"]),
    tensor("prompt_vocab_size", "INT32", [4]),
]
HARMLESS = [
    tensor("beam_width", "INT32", [1]),
    tensor("num_return_sequences", "INT32", [1]),
    tensor("bad_words", "BYTES", [b""]),
    tensor("length_penalty", "FP32", [1.0]),
    tensor("return_context_logits", "BOOL", [False]),
    tensor("return_generation_logits", "BOOL", [False]),
    tensor("embedding_bias_words", "BYTES", [b""]),
]


@pytest.mark.parametrize("unsupported", UNSUPPORTED, ids=lambda t: t.name())
def test_an_unsupported_tensor_is_refused_by_name(server: RunningServer, unsupported: Any) -> None:
    status, message = send(server, unsupported)
    assert status == INVALID
    assert unsupported.name() in message


@pytest.mark.parametrize("harmless", HARMLESS, ids=lambda t: t.name())
def test_an_unsupported_tensor_with_its_default_passes(
    server: RunningServer, harmless: Any
) -> None:
    inputs = [make_input("text_input", "Hello"), make_input("max_tokens", 4), harmless]
    answer = raw_request(server, inputs)
    assert answer.errors == []
    assert answer.finals == 1


@pytest.mark.parametrize("ids", [[5, VOCABULARY], [-1], [5, 2**31 - 1]])
@pytest.mark.parametrize("streaming", [True, False])
def test_token_ids_outside_the_vocabulary(
    server: RunningServer, ids: list[int], streaming: bool
) -> None:
    status, message = engine_request(server, ids, 4, streaming=streaming).error
    assert status == INVALID
    assert "input_ids" in message and str(VOCABULARY) in message


def test_input_lengths_that_disagree(server: RunningServer) -> None:
    inputs = [
        tensor("input_ids", "INT32", [5, 6, 7]),
        tensor("input_lengths", "INT32", [2]),
        tensor("request_output_len", "INT32", [4]),
    ]
    status, message = raw_request(server, inputs, model="tensorrt_llm").error
    assert status == INVALID
    assert "input_lengths" in message


def test_refused_requests_are_counted_as_failed(server: RunningServer) -> None:
    before = metrics(server)["requests_failed_total"]
    for _ in range(3):
        send(server, temperature=-1.0)
    assert metrics(server)["requests_failed_total"] == before + 3
