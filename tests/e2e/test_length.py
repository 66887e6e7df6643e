"""The length that was asked for, and one final flag for each request."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from client.grpc_stream import make_input
from client.http_generate import generate, generate_stream
from deepseek_triton.server import RunningServer
from deepseek_triton.text.tokenizer import Tokenizer
from tests.e2e.support import RawAnswer, concurrently, engine_request, raw_request

OUTPUTS = ("text_output", "finish_reason", "num_output_tokens")


def send(server: RunningServer, **values: Any) -> RawAnswer:
    values = {"text_input": "Hello", "return_num_output_tokens": True, **values}
    return raw_request(server, [make_input(*item) for item in values.items()], outputs=OUTPUTS)


def counted(answer: RawAnswer) -> int:
    return int(answer.arrays("num_output_tokens")[-1].reshape(-1)[0])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_equal_max_and_min_tokens_give_exactly_that_many(
    server: RunningServer, stream: bool, seed: int
) -> None:
    """At a high temperature the end token would be drawn now and then, were it allowed."""
    sampling = {"temperature": 50.0, "seed": seed}
    answer = send(server, max_tokens=64, min_tokens=64, stream=stream, **sampling)
    assert counted(answer) == 64
    assert answer.finals == 1
    # A response may carry several tokens when the engine is faster than the stream.
    assert 8 < len(answer.results) <= 64 if stream else len(answer.results) == 1


def test_exact_lengths_over_http(server: RunningServer) -> None:
    request = {"url": server.http_url, "max_tokens": 64, "min_tokens": 64}
    request["return_num_output_tokens"] = True
    events = list(generate_stream("Hello", **request))
    assert 8 < len(events) <= 64
    assert events[-1]["num_output_tokens"] == 64
    assert generate("Hello", **request)["num_output_tokens"] == 64


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("stream", [True, False])
def test_short_requests_have_one_final_flag_too(
    server: RunningServer, max_tokens: int, stream: bool
) -> None:
    answer = send(server, max_tokens=max_tokens, min_tokens=max_tokens, stream=stream)
    assert (counted(answer), answer.finals) == (max_tokens, 1)


def test_every_one_of_many_requests_has_one_final_flag(server: RunningServer) -> None:
    calls = [
        partial(send, server, max_tokens=n, min_tokens=n, stream=bool(n % 2)) for n in range(1, 25)
    ]
    answers = concurrently(calls)
    assert [answer.finals for answer in answers] == [1] * 24
    assert [counted(answer) for answer in answers] == list(range(1, 25))


def test_an_end_token_ends_with_reason_stop_and_is_not_in_the_text(
    server: RunningServer, tokenizer: Tokenizer
) -> None:
    """A token that greedy decoding reaches is declared the end token."""
    (ids,) = engine_request(server, tokenizer.encode("Hello"), 12).arrays("output_ids")
    output = ids.reshape(-1)[-12:].tolist()
    end_id = output[6]
    expected = output[: output.index(end_id)]
    answer = send(server, max_tokens=12, end_id=end_id, stream=True)
    reasons = [array.reshape(-1)[0].decode() for array in answer.arrays("finish_reason")]
    text = b"".join(array.reshape(-1)[0] for array in answer.arrays("text_output")).decode()
    assert reasons == [""] * (len(reasons) - 1) + ["stop"]
    assert text == tokenizer.decode(expected)
    assert counted(answer) == len(expected)
    assert answer.finals == 1
