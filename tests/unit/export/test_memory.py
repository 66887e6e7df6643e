"""Exporting holds a bounded part of the checkpoint in memory, whatever its size."""

from __future__ import annotations

import math
import mmap
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import psutil
from numpy.typing import NDArray

from deepseek_triton.checkpoint.names import expected_tensors
from deepseek_triton.checkpoint.reader import Block, row_blocks
from deepseek_triton.checkpoint.spec import ModelSpec, MoESpec, RoutingSpec
from deepseek_triton.export.portable import export_portable
from tests.unit.export.fakes import tiny_spec

MEGABYTE = 1 << 20


class SparseReader:
    """Serves bfloat16 views on one mapped file of holes; notes what is in memory at its peaks."""

    def __init__(self, spec: ModelSpec, path: Path) -> None:
        self._offsets = {}
        self.nbytes = self.largest = 0
        for name, shape in expected_tensors(spec):
            self._offsets[name] = self.nbytes
            self.nbytes += 2 * math.prod(shape)
            self.largest = max(self.largest, 2 * math.prod(shape))
        with path.open("wb+") as file:
            file.truncate(self.nbytes)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._process = psutil.Process()
        self._start = self._process.memory_info().rss
        self._path = os.fspath(path)
        self.growth = self.resident = 0  # bytes, at most: of the process, and of the mapped file

    def require(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        return np.ndarray(shape, ml_dtypes.bfloat16, self._map, self._offsets[name])

    def blocks(self, name: str, shape: tuple[int, ...]) -> Iterator[Block]:
        yield from row_blocks(self.require(name, shape))

    def int4(self, source: str) -> None:
        """No layer is INT4."""

    def release(self) -> None:
        self.growth = max(self.growth, self._process.memory_info().rss - self._start)
        maps = self._process.memory_maps(grouped=True)
        mapped = sum(entry.rss for entry in maps if entry.path == self._path)
        self.resident = max(self.resident, mapped)
        self._map.madvise(mmap.MADV_DONTNEED)


def test_memory_stays_near_a_few_chunks(tmp_path: Path) -> None:
    hidden, size, experts = 1024, 1024, 32
    moe = MoESpec(RoutingSpec("softmax", experts, 2, 1, 1, 1.0, False), size, 0)
    spec = tiny_spec(hidden_size=hidden, moe=moe)
    reader = SparseReader(spec, tmp_path / "checkpoint")
    assert reader.nbytes > 180 * MEGABYTE
    tracemalloc.start()
    try:
        path = export_portable(spec, reader, tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.with_name("weights.bin").stat().st_size > 1.99 * reader.nbytes
    assert peak < 40 * MEGABYTE
    # Of the input, what a release was due for and what the workers read ahead. Of the process, that
    # and heaps that grow by which worker came when: no input or output that is kept fits in there.
    assert MEGABYTE < reader.resident < reader.nbytes / 2
    assert reader.growth < reader.nbytes
