"""Sampling values and seeds: a meaning or an error that names the field; nobody else notices."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from client.grpc_stream import DTYPES
from deepseek_triton.server import RunningServer
from tests.e2e.support import NEVER, complete, concurrently, refusal

PROMPT = "What is deep learning?"
NAN, INF = math.nan, math.inf

BAD_VALUES: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (-1.0, -1e-12, NAN, INF, -INF)),
    *(("top_k", value) for value in (-2, -(2**31))),
    *(("top_p", value) for value in (-0.1, 1.5, NAN, INF)),
    *(("repetition_penalty", value) for value in (0.0, -1.0, NAN, INF)),
    *(("presence_penalty", value) for value in (NAN, INF, -2.5, 3.0)),
    *(("frequency_penalty", value) for value in (NAN, -INF, -2.5, 3.0)),
    *(("min_tokens", value) for value in (-1, 100)),  # 100 is more than max_tokens
]


@pytest.mark.parametrize("stream", [True, False])
def test_bad_values_are_refused_by_name_and_a_concurrent_stream_is_untouched(
    server: RunningServer, stream: bool
) -> None:
    neighbour = partial(
        complete, server, "Once upon a time", max_tokens=200, temperature=1.0, seed=3, end_id=NEVER
    )
    alone = neighbour().text

    def send_all_bad() -> list[str]:
        return [f for field, value in BAD_VALUES if (f := problem(field, value))]

    def problem(field: str, value: Any) -> str:
        """Say what is wrong with the answer; nothing if it is refused by name."""
        values = {"text_input": PROMPT, "max_tokens": 8, "stream": stream, "temperature": 0.5}
        values[field] = value
        tensors = {name: (DTYPES[name][0], v) for name, v in values.items()}
        message = refusal(server, tensors)
        return "" if message.startswith(f"{field}: ") else f"{field}={value}: {message}"

    together, problems = concurrently([neighbour, send_all_bad])
    assert problems == []
    assert together.text == alone


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1e-12},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 0.0, "seed": 5, "top_p": 0.9},
        {"top_k": 1},
    ],
)
def test_values_that_mean_greedy_give_the_greedy_text(
    server: RunningServer, sampling: dict[str, Any]
) -> None:
    greedy = complete(server, PROMPT, max_tokens=24, end_id=NEVER)
    assert complete(server, PROMPT, max_tokens=24, end_id=NEVER, **sampling).text == greedy.text


@pytest.mark.parametrize(
    "field_value", [("top_k", 0), ("top_k", -1), ("top_k", 9_999_999), ("top_p", 1.0)]
)
def test_values_that_mean_no_limit_change_nothing(
    server: RunningServer, field_value: tuple[str, Any]
) -> None:
    request = {"max_tokens": 24, "temperature": 1.0, "seed": 11, "end_id": NEVER}
    free = complete(server, PROMPT, **request)
    assert complete(server, PROMPT, **request, **dict([field_value])).text == free.text


def seeded(server: RunningServer, seed: int | None) -> str:
    return complete(server, PROMPT, max_tokens=32, temperature=1.0, seed=seed, end_id=NEVER).text


def test_a_seed_gives_its_text_at_any_load_and_other_seeds_give_others(
    server: RunningServer,
) -> None:
    alone = [seeded(server, seed) for seed in range(1, 6)]
    together = concurrently([partial(seeded, server, seed) for seed in range(1, 6)])
    reversed_order = concurrently([partial(seeded, server, seed) for seed in range(5, 0, -1)])
    assert together == alone
    assert reversed_order[::-1] == alone
    assert len(set(alone)) == 5


def test_without_a_seed_every_call_differs(server: RunningServer) -> None:
    texts = concurrently([partial(seeded, server, None)] * 5)
    texts += [seeded(server, None) for _ in range(2)]
    assert len(set(texts)) == 7


def test_penalties_change_the_text(server: RunningServer) -> None:
    """At a high temperature the draw is close enough for a penalty to change it."""
    request = {"max_tokens": 200, "temperature": 3.0, "seed": 2, "end_id": NEVER}
    plain = complete(server, PROMPT, **request).text
    for field, value in [
        ("repetition_penalty", 1.8), ("presence_penalty", 2.0), ("frequency_penalty", 2.0)
    ]:  # fmt: skip
        assert complete(server, PROMPT, **request, **{field: value}).text != plain, field
