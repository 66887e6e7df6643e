"""The Python backend's files in /dev/shm, through which tensors travel."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from deepseek_triton.errors import ServerError

SHM = Path("/dev/shm")
_MIB = 1 << 20
# 1 MiB for each of three model instances, and room for them to grow under load.
MIN_FREE_BYTES = 16 * _MIB


def new_region_prefix() -> str:
    """Return a name prefix that no other server uses, so that only our own files are removed."""
    return f"triton_python_backend_shm_region_{secrets.token_hex(4)}_"


def remove_regions(prefix: str, shm: Path = SHM) -> int:
    """Delete the files that begin with `prefix`, and return how many there were."""
    files = list(shm.glob(f"{prefix}*"))
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def check_space(shm: Path = SHM, min_free_bytes: int = MIN_FREE_BYTES) -> None:
    """Refuse to start where the Python backend would run out of shared memory.

    Raises:
        ServerError: `shm` is missing or has less than `min_free_bytes` free.
    """
    try:
        stat = os.statvfs(shm)
    except FileNotFoundError:
        raise ServerError(f"{shm} is missing; Triton's Python backend needs it") from None
    free = stat.f_bavail * stat.f_frsize
    if free < min_free_bytes:
        size = stat.f_blocks * stat.f_frsize
        raise ServerError(
            f"{shm} has {free / _MIB:.0f} of {size / _MIB:.0f} MiB free and "
            f"{min_free_bytes / _MIB:.0f} MiB are needed: remove stale files from it, or make it "
            "larger (docker run --shm-size=256m)"
        )
