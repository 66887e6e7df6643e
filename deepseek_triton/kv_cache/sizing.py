"""How many KV blocks fit, from the configuration and the memory that is there."""

from __future__ import annotations

from pathlib import Path

from deepseek_triton.config import CacheConfig, label
from deepseek_triton.errors import ConfigError
from deepseek_triton.kv_cache.spec import KVCacheSpec

_CGROUP = Path("/sys/fs/cgroup")


def num_blocks_for(
    config: CacheConfig,
    spec: KVCacheSpec,
    *,
    max_requests: int,
    max_context_len: int,
    available: int | None = None,
) -> int:
    """Return the number of KV blocks to allocate.

    `available` is the free memory in bytes where the pools will be; None: of this machine.

    Sizes by memory never exceed what `max_requests` requests of `max_context_len` tokens can use.
    Raises ConfigError when not even one block fits.
    """
    if config.num_blocks:
        return config.num_blocks
    if config.memory_mb:
        budget, key = config.memory_mb << 20, "kv_cache_memory_mb"
    else:
        free = available_memory() if available is None else available
        budget = int(free * config.memory_fraction)
        key = "kv_cache_memory_fraction"
    useful = max_requests * spec.blocks_for(max_context_len)
    num_blocks = min(useful, budget // spec.bytes_per_block)
    if num_blocks < 1:
        raise ConfigError(
            f"{label(key)}: {budget} bytes hold no KV block, which takes "
            f"{spec.bytes_per_block} bytes; raise it, or set {label('kv_cache_num_blocks')}"
        )
    return num_blocks


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Return the bytes that this process may still take: of the machine and of its container.

    Reads MemAvailable (proc(5)) and, inside a control group of version 2 or 1, its limit and usage.
    Idle page cache counts as available: the kernel gives it up first.
    """
    available = _read_field(meminfo, "MemAvailable:") * 1024
    for folder, limit_name, usage_name, cache_name in (
        (cgroup, "memory.max", "memory.current", "inactive_file"),
        (
            cgroup / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        limit, usage = _read_number(folder / limit_name), _read_number(folder / usage_name)
        if limit is not None and usage is not None:
            used = usage - _read_field(folder / "memory.stat", cache_name)
            return max(0, min(available, limit - used))
    return available


def _read_field(path: Path, name: str) -> int:
    """Return the number beside `name` in a file of one field a line; 0 if there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def _read_number(path: Path) -> int | None:
    """Return the number in a control file; None if there is no such file or no limit ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
