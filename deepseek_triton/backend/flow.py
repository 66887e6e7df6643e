"""How far postprocessing is behind the engine stage, known to both.

Triton hands each response of the engine stage to postprocessing through a queue without bound, and
tells the sender nothing of it. So responses are numbered, and postprocessing writes the number of
the last one it handled into memory that the two processes share.
"""

from __future__ import annotations

import logging
import mmap
import os
import time

import numpy as np
from numpy.typing import NDArray

_logger = logging.getLogger(__name__)

_NAME = "deepseek-triton-flow"
_BYTES = 8  # one int64
_SILENCE_S = 0.05  # after which what is on its way counts as lost: its request has ended

Mark = tuple[int, int, int]
"""Of a response: the sender's process id, its descriptor of the shared memory, a number."""


class Flow:
    """The sender's side. One thread sends."""

    def __init__(self) -> None:
        # Memory without a file: nobody has to remove it.
        self._descriptor = os.memfd_create(_NAME)
        os.ftruncate(self._descriptor, _BYTES)
        self._handled = _map(self._descriptor)
        self._sent = 0
        self._seen = 0  # the newest number that was handled, or given up
        self._seen_at = time.monotonic()

    def mark(self) -> Mark:
        """Return what the response that is sent now must carry."""
        self._sent += 1
        return os.getpid(), self._descriptor, self._sent

    def on_the_way(self, now: float) -> int:
        """Return how many responses were sent and not handled yet, at `now` (time.monotonic()).

        0 as long as no receiver has ever reported.
        """
        handled = int(self._handled[0])
        if handled == 0 or handled > self._sent:
            return 0
        if handled > self._seen or self._sent == self._seen:
            self._seen, self._seen_at = max(handled, self._seen), now
        elif now > self._seen_at + _SILENCE_S:
            self._seen, self._seen_at = self._sent, now
        return self._sent - self._seen


class FlowReport:
    """The receiver's side."""

    def __init__(self) -> None:
        self._sender = (0, 0)
        self._handled: NDArray[np.int64] | None = None

    def handled(self, mark: Mark) -> None:
        """Tell the sender that a response was handled, and with it all before.

        A mark that leads to no sender's memory is ignored: a client may have made it up.
        """
        if mark[:2] != self._sender:
            self._sender = mark[:2]
            self._handled = _open(*self._sender)
        if self._handled is not None:
            self._handled[0] = mark[2]


def _open(pid: int, descriptor: int) -> NDArray[np.int64] | None:
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        # Nothing else may be written to, whatever the mark says.
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        ours = os.open(path, os.O_RDWR)
    except OSError as error:
        _logger.warning("the engine stage cannot see how far this one is: %s", error)
        return None
    try:
        return _map(ours)
    finally:
        os.close(ours)


def _map(descriptor: int) -> NDArray[np.int64]:
    # One aligned store of 8 bytes: a reader never sees half of it.
    return np.frombuffer(mmap.mmap(descriptor, _BYTES), np.int64)
