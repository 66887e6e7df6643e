"""The metrics of a running engine: names, units and meaning, as data. backend/ registers them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

_PREFIX = "deepseek_triton_"


@dataclass(frozen=True)
class Metric:
    """One Prometheus metric. A counter only grows; its name ends in _total."""

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    help: str
    label: str | None = None  # name of its label, if its values are split by one

    @property
    def full_name(self) -> str:
        """The name that the metrics endpoint shows."""
        return _PREFIX + self.name


FAILED = Metric(
    "requests_failed_total",
    "counter",
    "requests",
    "Requests refused or ended by an error.",
    "stage",
)
"""The one that two models count: each adds the sample of its own stage."""

METRICS = (
    Metric("preemptions_total", "counter", "preemptions", "Requests that lost their KV blocks."),
    Metric("prompt_tokens_total", "counter", "tokens", "Prompt tokens of accepted requests."),
    Metric("tokens_generated_total", "counter", "tokens", "Tokens generated."),
    Metric("draft_tokens_total", "counter", "tokens", "Drafts that the model checked."),
    Metric("draft_tokens_accepted_total", "counter", "tokens", "Drafts that proved right."),
    Metric("requests_finished_total", "counter", "requests", "Requests that ended.", "reason"),
    FAILED,
    Metric("steps_total", "counter", "steps", "Steps run."),
    Metric("step_seconds_total", "counter", "seconds", "Time spent in steps, the model included."),
    Metric("runner_seconds_total", "counter", "seconds", "Time spent in the model runner."),
    # Last, because samples are passed on in this order: a request that a gauge no longer shows
    # is in the counters.
    Metric("requests_active", "gauge", "requests", "Requests in the running batch."),
    Metric("requests_waiting", "gauge", "requests", "Requests that wait for a place in the batch."),
    Metric("kv_blocks_total", "gauge", "blocks", "KV blocks of the pool."),
    Metric("kv_blocks_used", "gauge", "blocks", "KV blocks that requests hold."),
)


@dataclass(frozen=True)
class EngineStats:
    """Values of METRICS at one moment; each field is named as its metric."""

    requests_active: int = 0
    requests_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    preemptions_total: int = 0
    prompt_tokens_total: int = 0
    tokens_generated_total: int = 0
    draft_tokens_total: int = 0
    draft_tokens_accepted_total: int = 0
    requests_finished_total: Mapping[str, int] = field(default_factory=dict)  # by finish reason
    steps_total: int = 0
    step_seconds_total: float = 0.0
    runner_seconds_total: float = 0.0

    def samples(self, refused: int = 0) -> Iterator[tuple[Metric, dict[str, str], float]]:
        """Yield (metric, labels, value) for each of METRICS.

        `refused` counts the requests that the engine stage refused; they failed as well.
        """
        for metric in METRICS:
            if metric is FAILED:
                yield (
                    metric,
                    {"stage": "engine"},
                    self.requests_finished_total.get("error", 0) + refused,
                )
            elif metric.label is not None:
                for value, count in getattr(self, metric.name).items():
                    yield metric, {metric.label: value}, count
            else:
                yield metric, {}, getattr(self, metric.name)
