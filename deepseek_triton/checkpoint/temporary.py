"""Folders in the making: beside what they become, and gone if they do not."""

from __future__ import annotations

import fcntl
import glob
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


@contextmanager
def temporary_sibling(path: Path) -> Iterator[Path]:
    """Yield a new folder beside `path`, to be renamed; what is left when the block ends is removed.

    So are, first, those that killed processes left for the same `path`. The parent is made.
    Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.tmp-", dir=path.parent))
    lock = None
    try:
        lock = _locked(temporary)
        temporary.chmod(0o755)  # mkdtemp's 0700 would lock out a server of another user
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """Return an open `folder` that this process locked; None if another one has."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        os.close(opened)
        return None
    return opened


def _remove_abandoned(path: Path) -> None:
    """Remove temporary siblings of `path`, and theirs, whose process is gone, its lock with it."""
    name = glob.escape(path.name)
    for pattern in (f".{name}.tmp-*", f"..{name}.tmp-*"):
        for folder in path.parent.glob(pattern):
            if (lock := _locked(folder)) is not None:
                logger.info("%s: left by a process that was killed; removed", folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
