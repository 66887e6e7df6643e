"""Stop strings: matched on text, dropped from it, in each form that clients send."""

from __future__ import annotations

from typing import Any

import pytest

from client.http_generate import generate, generate_stream
from deepseek_triton.server import RunningServer
from tests.e2e.support import NEVER, Answer, complete, metrics, settled, wait_until

PROMPT = "What is deep learning?"
REQUEST: dict[str, Any] = {"max_tokens": 48, "end_id": NEVER, "exclude_input_in_output": True}


@pytest.fixture(scope="module")
def unstopped(shared_server: RunningServer) -> Answer:
    """A text with enough variety to stop in the middle of."""
    answer = complete(shared_server, PROMPT, temperature=1.0, seed=7, **REQUEST)
    assert len(answer.text) > 40
    return answer


def stopped(server: RunningServer, stop: object) -> list[tuple[str, str]]:
    """Text and finish reason over gRPC and HTTP, streamed and not."""
    request = {"temperature": 1.0, "seed": 7, "stop_words": stop, **REQUEST}
    answers = [complete(server, PROMPT, stream=stream, **request) for stream in (True, False)]
    http = {"url": server.http_url, **request}
    events = list(generate_stream(PROMPT, **http))
    whole = generate(PROMPT, **http)
    return [
        *((answer.text, answer.finish_reason) for answer in answers),
        ("".join(e["text_output"] for e in events), events[-1]["finish_reason"]),
        (whole["text_output"], whole["finish_reason"]),
    ]


@pytest.mark.parametrize(("begin", "length"), [(10, 1), (12, 3), (8, 12), (0, 2), (-4, 4)])
@pytest.mark.parametrize("form", ["string", "list"])
def test_the_text_ends_before_the_stop_string(
    server: RunningServer, unstopped: Answer, begin: int, length: int, form: str
) -> None:
    """Pieces of the text itself, of any length: they begin and end inside tokens and span them."""
    begin %= len(unstopped.text)
    stop = unstopped.text[begin : begin + length]
    expected = unstopped.text[: unstopped.text.index(stop)]
    for answer in stopped(server, stop if form == "string" else [stop]):
        assert answer == (expected, "stop")


def test_the_earliest_of_several_stop_strings_counts(
    server: RunningServer, unstopped: Answer
) -> None:
    late, early = unstopped.text[30:34], unstopped.text[14:19]
    first = min(unstopped.text.index(late), unstopped.text.index(early))
    for answer in stopped(server, [late, early, "never seen in this text"]):
        assert answer == (unstopped.text[:first], "stop")


@pytest.mark.parametrize("stop", ["", [""], ["", "never seen in this text"], ["foo", " bar"]])
def test_stop_strings_that_are_empty_or_do_not_occur_change_nothing(
    server: RunningServer, unstopped: Answer, stop: object
) -> None:
    assert not {"foo", " bar"} & {unstopped.text}
    for answer in stopped(server, stop):
        assert answer == (unstopped.text, "length")


@pytest.mark.parametrize("stop", ["\n", ["\n"]])
def test_a_newline_stops(server: RunningServer, stop: object) -> None:
    """Seeds until some text has a newline in it; each is cut there and nowhere else."""
    cut = 0
    for seed in range(40):
        request = {"temperature": 1.5, "seed": seed, **REQUEST}
        free = complete(server, PROMPT, **request)
        answer = complete(server, PROMPT, stop_words=stop, **request)
        head, newline, _ = free.text.partition("\n")
        assert (answer.text, answer.finish_reason) == (head, "stop" if newline else "length")
        cut += bool(newline)
        if cut >= 3:
            return
    pytest.fail("no seed gave a newline: the test has seen nothing")


def test_the_engine_stops_working_soon_after_a_stop_string(
    server: RunningServer, unstopped: Answer
) -> None:
    """The shared fixture checks that the engine is idle; here it must be so long before the end."""
    request = {**REQUEST, "max_tokens": 3500, "temperature": 1.0, "seed": 7}
    answer = complete(server, PROMPT, stop_words=unstopped.text[8:12], **request)
    assert answer.finish_reason == "stop"
    assert len(answer.chunks) < 100


def test_a_request_ended_by_a_stop_string_counts_as_stopped(
    server: RunningServer, unstopped: Answer
) -> None:
    def finished() -> tuple[float, float]:
        counts = metrics(server)
        return tuple(counts[f"requests_finished_total.{r}"] for r in ("stop", "cancelled"))

    settled(server)
    stopped_before, cancelled_before = finished()
    request = {**REQUEST, "max_tokens": 3500, "temperature": 1.0, "seed": 7}
    complete(server, PROMPT, stop_words=unstopped.text[8:12], **request)
    expected = (stopped_before + 1, cancelled_before)
    wait_until(lambda: finished() == expected, 2.0, "it is counted")
