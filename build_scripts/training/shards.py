"""Token shards: XZ of little-endian uint16."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def compress(tokens: NDArray[np.uint16]) -> bytes:
    """[N] token ids below 65536 → the bytes of a shard.

    A function's own copy lies near its file, inside the dictionary.
    """
    lzma2 = {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 25, "lc": 2, "lp": 1, "pb": 1}
    return lzma.compress(tokens.astype("<u2").tobytes(), lzma.FORMAT_XZ, filters=[lzma2])


def decompress(path: Path) -> NDArray[np.uint16]:
    """Read a shard → [N] uint16."""
    return np.frombuffer(lzma.decompress(path.read_bytes()), "<u2").astype(np.uint16)
