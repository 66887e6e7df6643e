"""Windows of tokens in an order that depends on the seed and the step alone."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .shards import decompress

BEGIN = 0  # <｜begin▁of▁sentence｜>
_SLACK = 512  # a window moves forward by up to so many tokens to begin with a document


class Windows:
    """Endless windows of `length` tokens over shuffled documents, one new order an epoch.

    A window is two tokens longer than its stride: the targets of both losses.
    """

    def __init__(self, tokens: NDArray[np.uint16], length: int, seed: int) -> None:
        self.tokens = tokens
        self.length = length
        self.seed = seed
        self._starts = np.flatnonzero(tokens == BEGIN)
        self.per_epoch = len(tokens) // (length - 2) - 1
        self._epoch = lru_cache(maxsize=1)(self._make_epoch)

    def batch(self, step: int, size: int) -> NDArray[np.int64]:
        """Return [size, length] int64: the windows of one step."""
        rows = []
        for index in range(step * size, (step + 1) * size):
            epoch, row = divmod(index, self.per_epoch)
            stream, starts = self._epoch(epoch)
            rows.append(stream[starts[row] : starts[row] + self.length])
        return np.stack(rows).astype(np.int64)

    def _make_epoch(self, epoch: int) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        """The documents in a new order, and where the windows over them begin, shuffled too."""
        generator = np.random.default_rng((self.seed, epoch))
        ends = np.append(self._starts[1:], len(self.tokens))
        order = generator.permutation(len(self._starts))
        sizes = (ends - self._starts)[order]
        begins = np.cumsum(sizes) - sizes
        # Position i of the new stream comes from i plus its document's displacement.
        source = np.repeat(self._starts[order] - begins, sizes) + np.arange(len(self.tokens))
        stream = self.tokens[source]
        starts = np.arange(self.per_epoch) * (self.length - 2)
        following = begins[np.minimum(np.searchsorted(begins, starts), len(begins) - 1)]
        near = (following >= starts) & (following < starts + _SLACK)
        starts = np.where(near, following, starts)
        return stream, generator.permutation(np.minimum(starts, len(stream) - self.length))


def prefetch(windows: Windows, size: int, start: int, stop: int) -> Iterator[NDArray[np.int64]]:
    """Yield the batches of steps `start` … `stop` - 1, made ahead of time by a thread."""
    batches: queue.Queue[NDArray[np.int64]] = queue.Queue(
        maxsize=64
    )  # outlasts the making of an epoch

    def produce() -> None:
        for step in range(start, stop):
            batches.put(windows.batch(step, size))

    threading.Thread(target=produce, daemon=True).start()
    for _ in range(start, stop):
        yield batches.get()


def load_windows(path: Path, length: int, seed: int) -> Windows:
    """Read one split, e.g. train.xz."""
    return Windows(decompress(path), length, seed)
