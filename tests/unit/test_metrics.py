import dataclasses

from deepseek_triton.metrics import METRICS, EngineStats


def test_names_are_unique_and_counters_end_in_total():
    assert len({metric.full_name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.full_name.startswith("deepseek_triton_")
        if metric.kind == "counter":
            assert metric.name.endswith("_total")


def test_every_field_of_the_stats_is_a_metric():
    names = {metric.name for metric in METRICS}
    assert {field.name for field in dataclasses.fields(EngineStats)} <= names


def test_samples_cover_every_metric_with_its_value():
    stats = EngineStats(requests_active=3, requests_finished_total={"stop": 4, "error": 2})
    samples = {(metric.name, *labels.values()): value for metric, labels, value in stats.samples()}
    assert samples["requests_active",] == 3
    assert samples["requests_finished_total", "stop"] == 4
    assert {name for name, *_ in samples} == {metric.name for metric in METRICS}


def test_refused_requests_count_as_failed():
    stats = EngineStats(requests_finished_total={"error": 2})
    values = {metric.name: value for metric, _, value in stats.samples(refused=3)}
    assert values["requests_failed_total"] == 5
