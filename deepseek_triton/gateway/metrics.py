"""The gateway's own metrics, as Prometheus' text format has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from deepseek_triton.gateway.triton import TritonServer

_PREFIX = "deepseek_triton_gateway_"
_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class _Histogram:
    def __init__(self, name: str, help_text: str) -> None:
        self._name, self._help = _PREFIX + name, help_text
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._sum += seconds
        self._counts[next((i for i, b in enumerate(_BOUNDS_S) if seconds <= b), -1)] += 1

    def lines(self) -> Iterator[str]:
        yield from _header(self._name, "histogram", self._help)
        total = 0
        for bound, count in zip((*map(str, _BOUNDS_S), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self._name}_bucket{{le="{bound}"}} {total}'
        yield f"{self._name}_sum {self._sum}"
        yield f"{self._name}_count {total}"


class GatewayMetrics:
    """Counts of one gateway process; belongs to its event loop."""

    def __init__(self) -> None:
        self.requests: defaultdict[tuple[str, int], int] = defaultdict(int)  # by route and status
        self.in_flight = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.disconnects = 0
        self.first_token = _Histogram(
            "first_token_seconds", "From a request's arrival to its first token."
        )
        self.duration = _Histogram(
            "request_seconds", "From a generating request's arrival to the end of its answer."
        )

    def render(self, servers: Iterable[TritonServer]) -> str:
        """Return all of them; `servers` are shown as they are now."""
        return "\n".join([*self._lines(list(servers)), ""])

    def _lines(self, servers: list[TritonServer]) -> Iterator[str]:
        name = _PREFIX + "requests_total"
        yield from _header(name, "counter", "Requests answered, by route and status.")
        for (route, status), count in sorted(self.requests.items()):
            yield f'{name}{{route="{route}",status="{status}"}} {count}'
        for key, kind, help_text, value in (
            ("requests_in_flight", "gauge", "Requests being answered.", self.in_flight),
            ("prompt_tokens_total", "counter", "Prompt tokens of answers.", self.prompt_tokens),
            ("cached_tokens_total", "counter", "Those found in the cache.", self.cached_tokens),
            ("completion_tokens_total", "counter", "Tokens generated.", self.completion_tokens),
            ("disconnects_total", "counter", "Clients that left early.", self.disconnects),
        ):
            yield from _header(_PREFIX + key, kind, help_text)
            yield f"{_PREFIX}{key} {value}"
        for key, help_text in (
            ("server_ready", "Whether a Triton server is ready."),
            ("server_requests", "Requests that a Triton server works on for this gateway."),
        ):
            yield from _header(_PREFIX + key, "gauge", help_text)
            for server in servers:
                value = int(server.ready) if key == "server_ready" else server.in_flight
                yield f'{_PREFIX}{key}{{server="{server.url}"}} {value}'
        yield from self.first_token.lines()
        yield from self.duration.lines()


def _header(name: str, kind: str, help_text: str) -> Iterator[str]:
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"
