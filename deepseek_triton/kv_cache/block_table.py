"""The KV blocks of one request, in token order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BlockTable:
    """Token t of the request lives in block `ids[t // block_size]`, at offset t % block_size.

    Grows by doubling. A view handed out stays as it was when the table grows or is cleared.
    """

    __slots__ = ("_buffer", "_view")

    def __init__(self) -> None:
        self._buffer = np.empty(8, np.int32)
        self._view = self._buffer[:0]

    def __len__(self) -> int:
        return len(self._view)

    @property
    def ids(self) -> NDArray[np.int32]:
        """Read-only view [m] of the block ids; the same object until the table changes."""
        return self._view

    def append(self, blocks: Sequence[int]) -> None:
        """Add `blocks` after the last one."""
        if not blocks:
            return
        old, new = len(self._view), len(self._view) + len(blocks)
        if new > len(self._buffer):
            grown = np.empty(max(new, 2 * len(self._buffer)), np.int32)
            grown[:old] = self._view
            self._buffer = grown
        self._buffer[old:new] = blocks
        self._view = self._buffer[:new]
        self._view.flags.writeable = False

    def clear(self) -> list[int]:
        """Empty the table and return the block ids that it held."""
        blocks: list[int] = self._view.tolist()
        self._buffer = np.empty_like(self._buffer)
        self._view = self._buffer[:0]
        return blocks
