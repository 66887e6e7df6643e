from __future__ import annotations

import time
from dataclasses import replace

import pytest

from deepseek_triton.backend.metrics_reporter import MetricsReporter
from deepseek_triton.metrics import METRICS, EngineStats
from tests.unit.backend.fakes import FakeUtils, fake_pb

STATS = EngineStats(requests_active=2, kv_blocks_used=5, tokens_generated_total=10,
                    requests_finished_total={"stop": 3, "length": 0})  # fmt: skip


class Source:
    stats = STATS

    def __call__(self) -> EngineStats:
        return self.stats


@pytest.fixture
def reporter():
    pb, utils = fake_pb()
    source = Source()
    reporter = MetricsReporter(pb, source)
    yield reporter, utils, source
    reporter.close()


def value(utils: FakeUtils, name: str, **labels: str) -> float:
    return utils.families[f"deepseek_triton_{name}"].samples[tuple(labels.items())]


def test_every_metric_is_registered_and_set(reporter) -> None:
    _, utils, _ = reporter
    assert {family.removeprefix("deepseek_triton_") for family in utils.families} == {
        metric.name for metric in METRICS
    }
    assert value(utils, "requests_active") == 2
    assert value(utils, "tokens_generated_total") == 10
    assert value(utils, "requests_finished_total", reason="stop") == 3


def wait_for(utils: FakeUtils, expected: float, name: str, **labels: str) -> None:
    deadline = time.monotonic() + 10
    while value(utils, name, **labels) != expected:
        assert time.monotonic() < deadline, f"{name} is {value(utils, name, **labels)}"
        time.sleep(0.005)


def test_gauges_follow_and_counters_grow(reporter) -> None:
    """A gauge that shows a request gone finds it counted, at whatever moment one looks."""
    report, utils, source = reporter
    source.stats = replace(STATS, requests_active=0, tokens_generated_total=12)
    report.touch()
    wait_for(utils, 0, "requests_active")
    assert value(utils, "tokens_generated_total") == 12


def test_refused_requests_add_to_the_failed_ones(reporter) -> None:
    report, utils, source = reporter
    source.stats = replace(
        STATS, requests_finished_total={**STATS.requests_finished_total, "error": 1}
    )
    report.count_refused()
    wait_for(utils, 2, "requests_failed_total", stage="engine")
