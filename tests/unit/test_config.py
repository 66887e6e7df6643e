import dataclasses

import pytest

from deepseek_triton.config import (
    CacheConfig,
    DeadlineConfig,
    EngineConfig,
    SchedulerConfig,
    settings,
    settings_markdown,
)
from deepseek_triton.errors import ConfigError, InvalidRequestError


def load(environ=None, **parameters):
    parameters.setdefault("engine_dir", "/engine")
    return EngineConfig.from_parameters(parameters, environ or {})


def test_defaults_hold_when_nothing_is_set():
    assert load() == EngineConfig(engine_dir="/engine")


def test_flat_strings_reach_the_composed_configs():
    config = load(max_batch_size="4", kv_cache_num_blocks=" 12 ", max_deadline_ms="700000")
    assert config.scheduler.max_batch_size == 4
    assert config.cache.num_blocks == 12
    assert config.deadline.max_ms == 700_000


def test_the_environment_wins_over_parameters():
    environ = {"DEEPSEEK_TRITON_MAX_BATCH_SIZE": "2", "PATH": "/bin"}
    assert load(environ, max_batch_size="4").scheduler.max_batch_size == 2


def test_an_empty_string_keeps_the_default():
    assert load({"DEEPSEEK_TRITON_NUM_THREADS": ""}, max_waiting=" ") == load()


def test_every_setting_can_be_set_from_both_sources():
    for setting in settings():
        text = "/engine" if setting.key == "engine_dir" else str(setting.default)
        assert load(**{setting.key: text}) == load()
        assert load({setting.env: text}) == load()


def test_parameters_of_tritons_own_backend_are_left_to_it():
    assert load(FORCE_CPU_ONLY_INPUT_TENSORS="no") == load()


def test_an_unknown_parameter_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="parameter max_batchsize.*did you mean max_batch_size"):
        load(max_batchsize="4")


def test_an_unknown_environment_variable_is_refused():
    with pytest.raises(ConfigError, match="DEEPSEEK_TRITON_MAX_BATCH is unknown"):
        load({"DEEPSEEK_TRITON_MAX_BATCH": "4"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_batch_size", "0"),
        ("max_batch_size", "four"),
        ("max_batch_size", "4.0"),
        ("max_tokens_per_step", "-1"),
        ("max_waiting", "1e3"),
        ("kv_cache_memory_fraction", "nan"),
        ("kv_cache_memory_fraction", "inf"),
        ("kv_cache_memory_fraction", "0"),
        ("kv_cache_memory_fraction", "1.5"),
        ("log_level", "loud"),
        ("engine_process", "foo"),
    ],
)
def test_a_bad_value_is_refused_with_key_value_and_range(key, value):
    setting = {s.key: s for s in settings()}[key]
    with pytest.raises(ConfigError) as caught:
        load(**{key: value})
    message = str(caught.value)
    assert value in message and setting.allowed in message
    assert message.startswith(f"{key} ({setting.env}): "), "as the user wrote it, in either place"


def test_no_engine_directory_is_refused_with_both_ways_to_set_it():
    with pytest.raises(ConfigError, match="engine_dir.*DEEPSEEK_TRITON_ENGINE_DIR"):
        load(engine_dir="")


def test_each_running_request_needs_a_token_in_a_step():
    with pytest.raises(
        ConfigError, match=r"max_tokens_per_step \(.*\): 8 is less than max_batch_size"
    ):
        SchedulerConfig(max_batch_size=9, max_tokens_per_step=8)


def test_the_default_deadline_may_not_exceed_the_longest():
    with pytest.raises(
        ConfigError, match=r"default_deadline_ms \(.*\): 5 is more than max_deadline_ms"
    ):
        DeadlineConfig(default_ms=5, max_ms=4)


@pytest.mark.parametrize("value", [True, "3", 2.0, None])
def test_configs_made_in_code_are_checked_as_well(value):
    with pytest.raises(ConfigError, match="kv_cache_num_blocks"):
        CacheConfig(num_blocks=value)


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().num_threads = 3


def test_a_deadline_counts_from_now():
    config = DeadlineConfig(default_ms=10, max_ms=20)
    assert config.deadline_ns(None, 7) == 10_000_007
    assert config.deadline_ns(20, 7) == 20_000_007


@pytest.mark.parametrize("milliseconds", [0, -1, 21])
def test_a_deadline_out_of_range_is_refused_with_the_limit(milliseconds):
    with pytest.raises(InvalidRequestError, match="deadline_ms.*1 to 20"):
        DeadlineConfig(default_ms=10, max_ms=20).deadline_ns(milliseconds, 0)


def test_the_table_has_a_row_for_each_setting():
    table = settings_markdown()
    keys = [setting.key for setting in settings()]
    assert len(keys) == len(set(keys))
    assert len(table.splitlines()) == 2 + len(keys)
    for setting in settings():
        assert f"| `{setting.key}` | `{setting.env}` |" in table
