"""Streamed text: the same as the whole text, byte for byte, whichever way it travels."""

from __future__ import annotations

import pytest

from client.http_generate import generate, generate_stream
from deepseek_triton.server import RunningServer
from deepseek_triton.text.tokenizer import Tokenizer
from tests.e2e.support import NEVER, PROMPTS, complete, engine_request

TOKENS = 32


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("exclude_input", [True, False])
def test_streamed_deltas_join_to_the_whole_text(
    server: RunningServer, prompt: str, exclude_input: bool
) -> None:
    request = {"max_tokens": TOKENS, "end_id": NEVER, "exclude_input_in_output": exclude_input}
    whole = complete(server, prompt, stream=False, **request)
    streamed = complete(server, prompt, stream=True, **request)
    over_http = list(generate_stream(prompt, url=server.http_url, **request))
    at_once = generate(prompt, url=server.http_url, **request)
    assert len(whole.chunks) == 1
    assert len(streamed.chunks) > 1
    assert streamed.text == whole.text
    assert "".join(event["text_output"] for event in over_http) == whole.text
    assert at_once["text_output"] == whole.text
    assert at_once["finish_reason"] == whole.finish_reason == streamed.finish_reason == "length"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_echo_is_the_prompt_followed_by_the_output(server: RunningServer, prompt: str) -> None:
    request = {"max_tokens": 8, "end_id": NEVER}
    output = complete(server, prompt, exclude_input_in_output=True, **request)
    echo = complete(server, prompt, exclude_input_in_output=False, **request)
    assert echo.text == prompt + output.text


def test_the_prompt_is_left_out_of_streams_and_echoed_otherwise_by_default(
    server: RunningServer,
) -> None:
    prompt = "What is deep learning?"
    output = complete(server, prompt, max_tokens=8, exclude_input_in_output=True).text
    assert complete(server, prompt, max_tokens=8, stream=True).text == output
    assert complete(server, prompt, max_tokens=8, stream=False).text == prompt + output


@pytest.mark.parametrize("prompt", PROMPTS)
def test_text_is_the_decoding_of_the_engines_tokens(
    server: RunningServer, tokenizer: Tokenizer, prompt: str
) -> None:
    """The first token's leading space is kept, since decoding all tokens at once keeps it."""
    answer = engine_request(server, tokenizer.encode(prompt), TOKENS)
    length = int(answer.arrays("sequence_length")[-1].reshape(-1)[0])
    ids = answer.arrays("output_ids")[-1].reshape(-1)[:length].tolist()
    text = complete(server, prompt, max_tokens=TOKENS, stream=False, exclude_input_in_output=True)
    assert text.text == tokenizer.decode(ids[-TOKENS:])


def test_a_leading_space_of_the_first_token_survives_streaming(
    server: RunningServer, tokenizer: Tokenizer
) -> None:
    """Sampled streams until several have begun with a token that starts with a space."""
    begun_with_space = 0
    for seed in range(60):
        request = {"max_tokens": 3, "temperature": 1.0, "seed": seed, "end_id": NEVER}
        deltas = complete(server, "Hello", **request).deltas
        whole = complete(server, "Hello", stream=False, exclude_input_in_output=True, **request)
        assert "".join(deltas) == whole.text
        begun_with_space += whole.text.startswith(" ")
    assert begun_with_space >= 3


def test_no_delta_ends_inside_a_character(server: RunningServer) -> None:
    for seed in range(10):
        request = {"max_tokens": 48, "temperature": 1.5, "seed": seed, "end_id": NEVER}
        streamed = complete(server, "深度", **request)
        whole = complete(server, "深度", stream=False, exclude_input_in_output=True, **request)
        assert streamed.text == whole.text
        # A random model writes broken characters too: as many as the whole text has, no more.
        count = sum(delta.count("\ufffd") for delta in streamed.deltas)
        assert count == whole.text.count("\ufffd")


@pytest.mark.parametrize(
    "text", ["How are you doing?", "3.14159 2718", "a\n\nb", "深度学习", "🙂", "\tx  y ", " "]
)
def test_the_tokenizer_round_trips_through_the_server(
    server: RunningServer, tokenizer: Tokenizer, text: str
) -> None:
    answer = complete(
        server, text, max_tokens=1, stream=False, exclude_input_in_output=False, end_id=NEVER,
        outputs=("text_output", "finish_reason", "num_input_tokens"), return_num_input_tokens=True,
    )  # fmt: skip
    assert answer.text.startswith(text)
    count = int(answer.chunks[0].outputs["num_input_tokens"].reshape(-1)[0])
    assert count == len(tokenizer.encode(text))
