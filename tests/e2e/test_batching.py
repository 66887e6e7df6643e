"""Many requests at once: each gets what it would get alone, also when KV blocks run out."""

from __future__ import annotations

from functools import partial
from typing import Any

from deepseek_triton.server import RunningServer
from tests.e2e.support import NEVER, PROMPTS, complete, concurrently, refusal, settled


def mixed_requests() -> list[dict[str, Any]]:
    requests = []
    for i in range(16):
        request: dict[str, Any] = {
            "prompt": PROMPTS[i % len(PROMPTS)] * (1 + i % 3),
            "max_tokens": 5 + 7 * i % 60,
            "stream": i % 3 != 0,
            "end_id": NEVER,
            "exclude_input_in_output": i % 4 != 1,
        }
        if i % 2:
            request |= {"temperature": 0.5 + i / 16, "seed": i, "top_p": 0.9, "top_k": 40}
        if i % 5 == 0:
            request["stop_words"] = ["e", "\n"]
        if i % 5 == 1:
            request["repetition_penalty"] = 1.3
        requests.append(request)
    return requests


def test_sixteen_mixed_requests_get_what_each_gets_alone(server: RunningServer) -> None:
    calls = [partial(complete, server, **request) for request in mixed_requests()]
    alone = [(answer.text, answer.finish_reason) for answer in (call() for call in calls)]
    for _ in range(3):
        together = [(a.text, a.finish_reason) for a in concurrently(calls)]
        assert together == alone


def test_more_requests_than_run_at_once_all_end(server: RunningServer) -> None:
    calls = [
        partial(complete, server, "Hello", max_tokens=20, temperature=1.0, seed=i, end_id=NEVER)
        for i in range(40)
    ]
    texts = [answer.text for answer in concurrently(calls)]
    assert texts[::8] == [calls[i]().text for i in range(0, 40, 8)]


def test_preemption_does_not_change_the_text(
    server: RunningServer, small_server: RunningServer
) -> None:
    """Six requests of 8 blocks each need twice the small pool when they are longest."""
    requests = [
        {"prompt": PROMPTS[0], "max_tokens": 115, "temperature": 0.8, "seed": i, "end_id": NEVER}
        for i in range(6)
    ]
    expected = [complete(server, **request).text for request in requests]
    before = settled(small_server)["preemptions_total"]
    answers = concurrently([partial(complete, small_server, **request) for request in requests])
    assert settled(small_server)["preemptions_total"] > before
    assert [answer.text for answer in answers] == expected


def test_a_request_that_can_never_fit_the_pool_is_refused(small_server: RunningServer) -> None:
    message = refusal(
        small_server, {"text_input": ("BYTES", "Hello"), "max_tokens": ("INT32", 2000)}
    )
    assert message.startswith("max_tokens: ") and "block" in message
