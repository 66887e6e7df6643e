from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from deepseek_triton.gateway.errors import ApiError
from deepseek_triton.gateway.pool import ServerPool
from deepseek_triton.gateway.triton import (
    Call,
    DeadlineExceeded,
    Piece,
    ServerRefusal,
    ServerUnavailable,
)
from tests.unit.gateway.fakes import FakeServer, final

BUSY = ServerRefusal("in ensemble 'ensemble', 5 requests run or wait already; try again later")


def call(affinity: str = "") -> Call:
    return Call("r", {"text_input": "x"}, affinity=affinity)


def collect(*servers: FakeServer, affinity: str = "") -> list[Piece]:
    async def run() -> list[Piece]:
        pool = ServerPool(list(servers))  # type: ignore[arg-type]
        return [piece async for piece in pool.stream(call(affinity), "messages")]

    return asyncio.run(run())


def chosen(servers: list[FakeServer], count: int, affinity: str = "") -> Counter[str]:
    """Where requests go that all stay in flight."""
    pool = ServerPool(servers)  # type: ignore[arg-type]
    found: Counter[str] = Counter()
    for index in range(count):
        server: Any = pool._choose(servers, affinity.format(index))  # type: ignore[arg-type]
        server.in_flight += 1
        found[server.url] += 1
    return found


def named(count: int) -> list[FakeServer]:
    return [FakeServer(url=f"s:{i}") for i in range(count)]


def test_requests_are_spread_evenly() -> None:
    assert set(chosen(named(3), 30).values()) == {10}


def test_idle_servers_take_turns() -> None:
    servers = named(3)
    pool = ServerPool(servers)  # type: ignore[arg-type]
    found = [pool._choose(servers, "").url for _ in range(6)]  # type: ignore[arg-type]
    assert found[:3] == found[3:] and len(set(found)) == 3


def test_equal_beginnings_go_to_one_server_until_it_is_too_busy() -> None:
    servers = named(4)
    first = chosen(servers, 1, "same")
    assert chosen(named(4), 1, "same") == first
    many = chosen(named(4), 40, "same")
    assert max(many.values()) == many[next(iter(first))]
    assert max(many.values()) <= 14, "a quarter more than its share, and one"


def test_a_beginning_keeps_its_server_when_another_leaves() -> None:
    servers = named(4)
    homes = {str(i): next(iter(chosen(named(4), 1, str(i)))) for i in range(50)}
    for beginning, home in homes.items():
        rest = [FakeServer(url=s.url) for s in servers if s.url != "s:0"]
        if home != "s:0":
            assert next(iter(chosen(rest, 1, beginning))) == home
    assert set(homes.values()) == {s.url for s in servers}


@pytest.mark.parametrize("problem", [ServerUnavailable("gone"), BUSY])
def test_another_server_is_tried_before_the_first_token(problem: Exception) -> None:
    good = FakeServer([final("ok")], url="good")
    for order in ([FakeServer([problem], url="bad"), good], [good, FakeServer([problem])]):
        pieces = collect(*order)
        assert [piece.text for piece in pieces] == ["ok"]


def test_no_other_server_is_tried_after_the_first_token() -> None:
    bad = FakeServer([Piece("a"), ServerUnavailable("gone")], url="a")
    good = FakeServer([final("ok")], url="b", in_flight=5)
    with pytest.raises(ApiError) as caught:
        collect(bad, good)
    assert caught.value.status == 503
    assert good.calls == []


@pytest.mark.parametrize(
    ("problem", "status"),
    [
        (ServerRefusal("in ensemble 'ensemble', temperature: -1 is negative"), 400),
        (ServerRefusal("in ensemble 'ensemble', internal error (ValueError): x"), 500),
        (ServerRefusal("Value: of something unknown"), 500),
        (BUSY, 503),
        (ServerUnavailable("gone"), 503),
        (DeadlineExceeded(), 504),
    ],
)
def test_what_a_servers_failure_means_to_the_client(problem: Exception, status: int) -> None:
    with pytest.raises(ApiError) as caught:
        collect(FakeServer([problem]))
    assert caught.value.status == status
    assert ("Retry-After" in caught.value.headers) == (status == 503)


def test_no_ready_server_is_unavailable() -> None:
    with pytest.raises(ApiError) as caught:
        collect(FakeServer(ready=False))
    assert caught.value.status == 503


def test_messages_of_a_full_engine_are_known() -> None:
    """The gateway tells a full engine by the end of its message."""
    from tests.unit.engine.test_engine import engine, request

    under_test = engine(max_batch_size=1, max_waiting=0)
    under_test.submit(request("a"), lambda output: None)
    with pytest.raises(Exception, match=r"try again later$"):
        under_test.submit(request("b"), lambda output: None)
