import pytest

from deepseek_triton.config import CacheConfig
from deepseek_triton.errors import ConfigError
from deepseek_triton.kv_cache import sizing
from deepseek_triton.kv_cache.spec import KVCacheSpec

SPEC = KVCacheSpec(num_layers=2, width=16, block_size=8)  # 1 KiB a block
LIMITS = {"max_requests": 1000, "max_context_len": 8000}


def test_a_block_count_decides_before_memory():
    config = CacheConfig(num_blocks=7, memory_mb=1)
    assert sizing.num_blocks_for(config, SPEC, **LIMITS) == 7


def test_memory_in_mebibytes_becomes_blocks():
    config = CacheConfig(memory_mb=1)
    assert sizing.num_blocks_for(config, SPEC, **LIMITS) == (1 << 20) // SPEC.bytes_per_block


def test_a_fraction_is_taken_of_the_available_memory(monkeypatch):
    monkeypatch.setattr(sizing, "available_memory", lambda: 100 * SPEC.bytes_per_block)
    config = CacheConfig(memory_fraction=0.5)
    assert sizing.num_blocks_for(config, SPEC, **LIMITS) == 50


def test_no_more_blocks_than_all_requests_can_use():
    config = CacheConfig(memory_mb=1)
    assert sizing.num_blocks_for(config, SPEC, max_requests=3, max_context_len=17) == 9


def test_memory_for_no_block_is_refused_with_the_setting_to_raise(monkeypatch):
    monkeypatch.setattr(sizing, "available_memory", lambda: SPEC.bytes_per_block)
    with pytest.raises(
        ConfigError, match=r"kv_cache_memory_fraction \(.*\): 256 bytes.*takes 1024 bytes"
    ):
        sizing.num_blocks_for(CacheConfig(), SPEC, **LIMITS)


@pytest.fixture
def meminfo(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:  9000 kB\nMemAvailable:  5000 kB\n")
    return path


def test_without_a_control_group_the_machine_decides(meminfo, tmp_path):
    assert sizing.available_memory(meminfo, tmp_path / "none") == 5000 * 1024


def test_an_unlimited_control_group_does_not_count(meminfo, tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert sizing.available_memory(meminfo, tmp_path) == 5000 * 1024


@pytest.mark.parametrize(
    ("folder", "limit", "usage", "cache"),
    [
        (".", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_limited_control_group_decides_and_its_idle_cache_is_available(
    meminfo, tmp_path, folder, limit, usage, cache
):
    group = tmp_path / folder
    group.mkdir(exist_ok=True)
    (group / limit).write_text("3000\n")
    (group / usage).write_text("2500\n")
    (group / "memory.stat").write_text(f"anon 1500\n{cache} 1000\n")
    assert sizing.available_memory(meminfo, tmp_path) == 1500
