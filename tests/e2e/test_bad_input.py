"""Requests that can never succeed: an answer naming the field, and the next request works."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from client.grpc_stream import DTYPES, make_input
from deepseek_triton.server import RunningServer
from deepseek_triton.text.tokenizer import Tokenizer
from tests.e2e.support import (
    complete,
    metrics,
    raw_request,
    refusal,
    settled,
    tensor,
    wait_until,
)

CONTEXT = 4096  # of the checkpoint
VOCABULARY = 4096


@pytest.fixture(autouse=True)
def next_request_works(server: RunningServer) -> Iterator[None]:
    before = complete(server, "Hello", max_tokens=4)
    yield
    assert complete(server, "Hello", max_tokens=4).text == before.text


def refused(server: RunningServer, **values: Any) -> str:
    """The message that a request gets which differs from a good one by `values`."""
    values = {"text_input": "Hello", "max_tokens": 4, "stream": True, **values}
    return refusal(server, {name: (DTYPES[name][0], value) for name, value in values.items()})


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("max_tokens", [0, -1, -(2**31)])
def test_max_tokens_below_one(server: RunningServer, max_tokens: int, stream: bool) -> None:
    message = refused(server, max_tokens=max_tokens, stream=stream)
    assert message.startswith(f"max_tokens: {max_tokens}")


@pytest.mark.parametrize("stream", [True, False])
def test_an_empty_prompt(server: RunningServer, stream: bool) -> None:
    assert refused(server, text_input="", stream=stream).startswith("text_input: ")


def test_a_prompt_of_one_space_is_a_prompt(server: RunningServer) -> None:
    answer = complete(server, " ", max_tokens=4, min_tokens=4)
    assert answer.finish_reason == "length"


def test_prompt_and_max_tokens_over_the_limit_name_both_and_the_limit(
    server: RunningServer, tokenizer: Tokenizer
) -> None:
    length = len(tokenizer.encode("Hello"))
    message = refused(server, max_tokens=CONTEXT - length + 1)
    for number in (length, CONTEXT - length + 1, CONTEXT):
        assert str(number) in message
    assert complete(server, "Hello", max_tokens=CONTEXT - length, stop_words=["e"]).finish_reason
    assert str(CONTEXT) in refused(server, text_input="word " * 3 * CONTEXT)


def test_a_prompt_that_is_not_utf8(server: RunningServer) -> None:
    inputs = [tensor("text_input", "BYTES", [b"\xff\xfe\xfa"]), make_input("max_tokens", 4)]
    message = raw_request(server, inputs).error
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
    values = {"text_input": "Hello", "max_tokens": 4}
    values.pop(wrong.name(), None)
    inputs = [wrong, *(make_input(*item) for item in values.items())]
    assert wrong.name() in raw_request(server, inputs).error


def test_two_prompts_in_one_request(server: RunningServer) -> None:
    inputs = [
        tensor("text_input", "BYTES", [b"one", b"two"], shape=[2, 1]),
        tensor("max_tokens", "INT32", [3, 5], shape=[2, 1]),
    ]
    assert "one prompt" in raw_request(server, inputs).error


@pytest.mark.parametrize("missing", ["text_input", "max_tokens"])
def test_a_missing_required_tensor_is_named(server: RunningServer, missing: str) -> None:
    values = {"text_input": "Hello", "max_tokens": 4}
    del values[missing]
    answer = raw_request(server, [make_input(*item) for item in values.items()])
    assert missing in answer.error


UNSUPPORTED: list[tuple[str, str, Any]] = [
    ("beam_width", "INT32", 2),
    ("num_return_sequences", "INT32", 2),
    ("bad_words", "BYTES", "foo"),
    ("length_penalty", "FP32", 2.0),
    ("return_context_logits", "BOOL", True),
    ("return_generation_logits", "BOOL", True),
    ("embedding_bias_words", "BYTES", "foo"),
    ("lora_task_id", "UINT64", 3),
    ("prompt_vocab_size", "INT32", 4),
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


@pytest.mark.parametrize("unsupported", UNSUPPORTED, ids=lambda u: u[0])
def test_an_unsupported_tensor_is_refused_by_name(
    server: RunningServer, unsupported: tuple[str, str, Any]
) -> None:
    name, dtype, value = unsupported
    tensors = {"text_input": ("BYTES", "Hello"), "max_tokens": ("INT32", 4), name: (dtype, value)}
    assert refusal(server, tensors).startswith(f"{name}: ")


@pytest.mark.parametrize("harmless", HARMLESS, ids=lambda t: t.name())
def test_an_unsupported_tensor_with_its_default_passes(
    server: RunningServer, harmless: Any
) -> None:
    inputs = [make_input("text_input", "Hello"), make_input("max_tokens", 4), harmless]
    answer = raw_request(server, inputs)
    assert answer.errors == []
    assert answer.finals == 1


def engine_refusal(
    server: RunningServer, ids: list[int], length: int, streaming: bool = False
) -> str:
    tensors = {
        "input_ids": ("INT32", ids),
        "input_lengths": ("INT32", length),
        "request_output_len": ("INT32", 4),
        "streaming": ("BOOL", streaming),
    }
    return refusal(server, tensors, model="tensorrt_llm")


@pytest.mark.parametrize("ids", [[5, VOCABULARY], [-1], [5, 2**31 - 1]])
@pytest.mark.parametrize("streaming", [True, False])
def test_token_ids_outside_the_vocabulary(
    server: RunningServer, ids: list[int], streaming: bool
) -> None:
    message = engine_refusal(server, ids, len(ids), streaming)
    assert message.startswith("input_ids: ") and str(VOCABULARY) in message


def test_input_lengths_that_disagree(server: RunningServer) -> None:
    assert engine_refusal(server, [5, 6, 7], 2).startswith("input_lengths: ")


@pytest.mark.parametrize(
    ("stage", "bad"), [("preprocessing", {"text_input": ""}), ("engine", {"temperature": -1.0})]
)
def test_refused_requests_are_counted_as_failed(
    server: RunningServer, stage: str, bad: dict[str, Any]
) -> None:
    def failed() -> dict[str, float]:
        counts = metrics(server)
        return {s: counts[f"requests_failed_total.{s}"] for s in ("preprocessing", "engine")}

    settled(server)
    before = failed()
    refused(server, **bad)  # once over gRPC, twice over HTTP
    expected = {**before, stage: before[stage] + 3}
    wait_until(lambda: failed() == expected, 2.0, "all counted")


@pytest.mark.parametrize("words", [["x"] * 65, ["x" * 4097]])
def test_too_many_or_too_long_stop_words(server: RunningServer, words: list[str]) -> None:
    assert refused(server, stop_words=words).startswith("stop_words: ")
