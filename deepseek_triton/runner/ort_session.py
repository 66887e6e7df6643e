"""ONNX Runtime on the CPU: session options, threads, KV pools bound in place."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from deepseek_triton.errors import ConfigError, EngineMismatchError
from deepseek_triton.kv_cache.spec import KVCacheSpec

_CGROUP = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Return the cores that this process may use: its affinity, limited by the cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        cores = min(cores or 1, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or the quota is "max"
        pass
    return cores or 1


def available_memory() -> int | None:
    """Return the bytes that this process may still take, or None if the system does not say."""
    limits = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        used = int((_CGROUP / "memory.current").read_text()) - int(stat["file"])
        limits.append(limit - used)
    except (OSError, KeyError, ValueError):  # no cgroup v2, or no limit
        pass
    return min(limits, default=None)


def open_session(model_path: Path, num_threads: int) -> ort.InferenceSession:
    """Load `model_path` for serving on `num_threads` threads.

    Raises:
        EngineMismatchError: ONNX Runtime refuses the model.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    # Threads spin between the nodes of a run but not between runs: while the scheduler and the
    # server work, the cores are theirs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Shapes change from step to step: a pattern for each would grow without bound.
    options.enable_mem_pattern = False
    options.log_severity_level = 3
    try:
        return ort.InferenceSession(
            os.fspath(model_path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # ONNX Runtime's own types have no common base of theirs
        raise EngineMismatchError(
            f"{model_path}: ONNX Runtime {ort.__version__} cannot load it: {error}"
        ) from error


def allocate_pools(spec: KVCacheSpec, num_blocks: int) -> list[NDArray[np.float32]]:
    """Return one zeroed pool [num_blocks, block_size, width] for each layer.

    Raises:
        ConfigError: less memory is available than the pools need.
    """
    needed = spec.bytes_per_block * num_blocks
    available = available_memory()
    problem = (
        f"num_blocks: {num_blocks} KV blocks of {spec.bytes_per_block} bytes need {needed} bytes"
    )
    if available is not None and needed > available:
        raise ConfigError(f"{problem}, {available} are available: lower num_blocks")
    shape = (num_blocks, spec.block_size, spec.width)
    try:
        return [np.zeros(shape, spec.dtype) for _ in range(spec.num_layers)]
    except MemoryError as error:
        raise ConfigError(f"{problem}, which cannot be allocated: lower num_blocks") from error
