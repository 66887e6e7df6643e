"""How many KV blocks fit, from the configuration and the memory that is there."""

from __future__ import annotations

from pathlib import Path

from deepseek_triton.config import CacheConfig
from deepseek_triton.errors import ConfigError
from deepseek_triton.kv_cache.spec import KVCacheSpec

_CGROUP = Path("/sys/fs/cgroup")


def num_blocks_for(
    config: CacheConfig, spec: KVCacheSpec, *, max_requests: int, max_context_len: int
) -> int:
    """Return the number of KV blocks to allocate.

    Sizes by memory never exceed what `max_requests` requests of `max_context_len` tokens can use.
    Raises ConfigError when not even one block fits.
    """
    if config.num_blocks:
        return config.num_blocks
    if config.memory_mb:
        budget, key = config.memory_mb << 20, "kv_cache_memory_mb"
    else:
        budget = int(available_memory() * config.memory_fraction)
        key = "kv_cache_memory_fraction"
    useful = max_requests * spec.blocks_for(max_context_len)
    num_blocks = min(useful, budget // spec.bytes_per_block)
    if num_blocks < 1:
        raise ConfigError(
            f"{key}: {budget} bytes hold no KV block, which takes {spec.bytes_per_block} bytes; "
            "raise it, or set kv_cache_num_blocks"
        )
    return num_blocks


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Return the bytes that this process may still take: of the machine and of its container.

    Reads MemAvailable (proc(5)) and, inside a control group, memory.max − memory.current of
    version 2 or the limit and usage of version 1.
    """
    machine = 0
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            machine = int(line.split()[1]) * 1024
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, usage = _read_number(cgroup / limit_name), _read_number(cgroup / usage_name)
        if limit is not None and usage is not None:
            return max(0, min(machine, limit - usage))
    return machine


def _read_number(path: Path) -> int | None:
    """Return the number in a control file; None if there is no such file or no limit ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
