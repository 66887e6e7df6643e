"""Keeps the engine's metrics at Triton's metrics endpoint up to date."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from deepseek_triton.backend.pb import Pb
from deepseek_triton.metrics import METRICS, EngineStats, Metric

_logger = logging.getLogger(__name__)

_BUSY_INTERVAL_S = 0.25
_LEAST_INTERVAL_S = 0.05  # however often requests come and go


def register(pb: Pb, metric: Metric) -> Any:
    """Return the family of `metric`; models that register the same one share it."""
    return pb.metric_family(
        metric.full_name, f"{metric.help} ({metric.unit})", counter=metric.kind == "counter"
    )


class MetricsReporter:
    """Updates from a thread of its own: a few times a second while busy, else when touched."""

    def __init__(self, pb: Pb, stats: Callable[[], EngineStats]) -> None:
        self._families = {metric.name: register(pb, metric) for metric in METRICS}
        self._stats = stats
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[Any, float]] = {}
        self._refused = 0
        self._touched = threading.Event()
        self._closing = threading.Event()
        self.update()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def touch(self) -> None:
        """Say that something began or ended."""
        self._touched.set()

    def count_refused(self) -> None:
        """Count a request that never entered the engine. Called by one thread only."""
        self._refused += 1
        self._touched.set()

    def close(self) -> None:
        """Stop updating; idempotent."""
        self._closing.set()
        self._touched.set()
        self._thread.join(5.0)

    def update(self) -> bool:
        """Pass on what changed; return whether the engine has requests."""
        stats = self._stats()
        for metric, labels, value in stats.samples(self._refused):
            key = (metric.name, tuple(labels.items()))
            if key not in self._values:
                self._values[key] = (self._families[metric.name].Metric(labels=labels), 0.0)
            sample, previous = self._values[key]
            if value != previous:
                if metric.kind == "counter":
                    sample.increment(value - previous)
                else:
                    sample.set(value)
                self._values[key] = (sample, value)
        return stats.requests_active + stats.requests_waiting > 0

    def _run(self) -> None:
        busy = False
        while not self._closing.is_set():
            self._touched.wait(_BUSY_INTERVAL_S if busy else None)
            self._touched.clear()
            try:
                busy = self.update()
            except Exception:
                _logger.exception("metrics could not be updated")
                return
            self._closing.wait(_LEAST_INTERVAL_S)
