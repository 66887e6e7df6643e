"""Several Triton servers: which one takes a request, and a second try where that is safe."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence

from deepseek_triton.gateway.errors import from_server, timed_out, unavailable
from deepseek_triton.gateway.triton import (
    Call,
    DeadlineExceeded,
    Piece,
    ServerRefusal,
    ServerUnavailable,
    TritonServer,
)

_logger = logging.getLogger(__name__)

_PROBE_INTERVAL_S = 1.0
_CANCEL_S = 0.2
_IMBALANCE = 1.25  # a preferred server may have this share of the mean load, and one more


class ServerPool:
    """Belongs to one event loop; `start` it there."""

    def __init__(self, servers: Sequence[TritonServer]) -> None:
        self.servers = tuple(servers)
        self._turn = 0
        self._prober: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look which servers are ready, and keep looking."""
        await self._probe()
        self._prober = asyncio.create_task(self._keep_probing())

    async def close(self) -> None:
        """Stop looking and close the connections."""
        if self._prober is not None:
            self._prober.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._prober
        await asyncio.gather(*(server.close() for server in self.servers))
        # gRPC tells the servers of cancelled calls in the background. The end of this loop would
        # end that too, and requests that nobody waits for would run on.
        await asyncio.sleep(_CANCEL_S)

    @property
    def ready(self) -> bool:
        """Whether any server is."""
        return any(server.ready for server in self.servers)

    async def stream(self, call: Call, prompt_param: str) -> AsyncGenerator[Piece, None]:
        """Yield the answer of one server; closing the generator cancels the request.

        A server that cannot be reached or is full is replaced by another as long as it has given
        nothing. Raises ApiError.
        """
        tried: set[TritonServer] = set()
        problem = unavailable("no server is ready; try again later")
        for server in self._candidates(call.affinity, tried):
            tried.add(server)
            begun = False
            try:
                async with contextlib.aclosing(server.stream(call)) as pieces:
                    async for piece in pieces:
                        begun = True
                        yield piece
                return
            except DeadlineExceeded:
                raise timed_out(call.timeout_s) from None
            except ServerRefusal as error:
                problem = from_server(str(error), prompt_param)
            except ServerUnavailable as error:
                problem = unavailable(f"the server went away ({error}); try again later")
            _logger.info("request %s on %s: %s", call.request_id, server.url, problem)
            if begun or problem.status != 503:
                break
        raise problem

    def _candidates(self, affinity: str, tried: Collection[TritonServer]) -> Iterator[TritonServer]:
        """Yield the best server that is ready and not tried, until there is none."""
        while True:
            ready = [s for s in self.servers if s.ready and s not in tried]
            if not ready:
                return
            yield self._choose(ready, affinity)

    def _choose(self, ready: Sequence[TritonServer], affinity: str) -> TritonServer:
        """Return the first by rendezvous hashing that is not too busy; else the least busy.

        Each server gets about the same share of affinities, and keeps its own when others come and
        go. The bound on its load keeps one popular beginning from taking one server down.
        """
        if affinity and len(ready) > 1:
            limit = _IMBALANCE * sum(s.in_flight for s in ready) / len(ready) + 1
            ranked = sorted(ready, key=lambda s: _weight(s.url, affinity), reverse=True)
            return next(server for server in ranked if server.in_flight <= limit)
        self._turn += 1
        order = [ready[(self._turn + i) % len(ready)] for i in range(len(ready))]
        return min(order, key=lambda server: server.in_flight)

    async def _probe(self) -> None:
        await asyncio.gather(*(server.probe() for server in self.servers))

    async def _keep_probing(self) -> None:
        while True:
            await asyncio.sleep(_PROBE_INTERVAL_S)
            await self._probe()


def _weight(url: str, affinity: str) -> bytes:
    return hashlib.blake2b(f"{url}\0{affinity}".encode(), digest_size=8).digest()
