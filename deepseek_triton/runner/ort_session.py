"""ONNX Runtime on the CPU: session options, threads, KV pools bound in place."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from deepseek_triton.config import label
from deepseek_triton.errors import ConfigError, EngineMismatchError
from deepseek_triton.kv_cache.sizing import available_memory
from deepseek_triton.kv_cache.spec import KVCacheSpec

# Folding a Transpose into a product with per-head weights gives up ONNX Runtime's threaded path.
_DISABLED_OPTIMIZERS = ["MatmulTransposeFusion"]

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


def open_session(model_path: Path, num_threads: int) -> ort.InferenceSession:
    """Load `model_path` for serving on `num_threads` threads.

    Raises:
        EngineMismatchError: ONNX Runtime refuses the model.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    # A thread that waits for the next node spins for a moment only: without spinning a decode step
    # takes 7% longer on idle cores, with the default of 1 ms 70% longer when the server's other
    # processes want the same cores. Between runs nothing spins.
    options.add_session_config_entry("session.intra_op.spin_duration_us", "20")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Shapes change from step to step: a pattern for each would grow without bound.
    options.enable_mem_pattern = False
    options.log_severity_level = 3
    try:
        return ort.InferenceSession(
            os.fspath(model_path),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=_DISABLED_OPTIMIZERS,
        )
    except Exception as error:  # ONNX Runtime's own types have no common base of theirs
        raise EngineMismatchError(
            f"{model_path}: ONNX Runtime {ort.__version__} cannot load it: {error}"
        ) from error


def allocate_pools(spec: KVCacheSpec, num_blocks: int) -> dict[str, NDArray[np.float32]]:
    """Return the zeroed pools [num_blocks + 1, block_size, width] of all layers by graph input.

    The last block is for padding.

    Raises:
        ConfigError: less memory is available than the pools need.
    """
    needed, available = spec.bytes_per_block * (num_blocks + 1), available_memory()
    problem = (
        f"{num_blocks} KV blocks of {spec.bytes_per_block:,} bytes and one for padding need "
        f"{needed:,} bytes of memory"
    )
    way_out = f"lower {label('kv_cache_num_blocks')} or {label('kv_cache_memory_mb')}"
    if 0 < available < needed:
        raise ConfigError(f"{problem}, {available:,} are available: {way_out}")
    shape = (num_blocks + 1, spec.block_size, spec.width)
    try:
        return {name: np.zeros(shape, spec.dtype) for name in spec.pool_names}
    except MemoryError as error:
        raise ConfigError(f"{problem}, which cannot be allocated: {way_out}") from error
