"""The CUDA side of the TensorRT runner on a real GPU, without TensorRT.

Rows are written by the kernel, at once and from a recorded graph whose inputs change, and compared
with NumPy. Needs a GPU, cuda-bindings and NVRTC; prints one JSON object.

    python perf/gpu/tensorrt_device_check.py
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.runner.tensorrt_device import CudaDevice

LAYERS, BLOCKS, BLOCK_SIZE = 27, 512, 16
SLOTS = BLOCKS * BLOCK_SIZE


class Case:
    """Pools and new rows of `row_bytes` each, on the device and in NumPy."""

    def __init__(self, device: CudaDevice, row_bytes: int, tokens: int) -> None:
        rng = np.random.default_rng(row_bytes)
        self.device, self.row_bytes, self.tokens = device, row_bytes, tokens
        self.pools = rng.integers(1, 255, (LAYERS, SLOTS, row_bytes), np.uint8)
        self.rows = rng.integers(1, 255, (LAYERS, tokens, row_bytes), np.uint8)
        self.pool_places = [self._upload(pool) for pool in self.pools]
        row_places = [self._upload(rows) for rows in self.rows]
        self.pool_table = self._upload(np.array(self.pool_places, np.uint64))
        self.row_table = self._upload(np.array(row_places, np.uint64))
        self.places = device.pinned((2, tokens), np.int32)
        self.device_places = device.allocate(self.places.nbytes)

    def choose(self, seed: int) -> None:
        """Draw other slots and tails, −1 for one token in eight; expect what they do."""
        rng = np.random.default_rng(seed)
        blocks = rng.permutation(BLOCKS)[: self.tokens]
        offsets = rng.integers(0, BLOCK_SIZE, self.tokens)
        slots = np.where(rng.random(self.tokens) < 0.125, -1, blocks * BLOCK_SIZE + offsets)
        tails = np.where(rng.random(self.tokens) < 0.5, BLOCK_SIZE - 1 - offsets, 0)
        self.places[:] = slots, np.where(slots < 0, 0, tails)
        for token, (slot, tail) in enumerate(self.places.T):
            if slot >= 0:
                self.pools[:, slot] = self.rows[:, token]
                self.pools[:, slot + 1 : slot + 1 + tail] = 0
        self.device.upload(self.device_places, self.places)

    def write(self) -> None:
        """Put the write of the rows into the stream."""
        self.device.write_rows(
            self.pool_table,
            self.row_table,
            (self.tokens, LAYERS),
            self.device_places,
            self.device_places + self.tokens * 4,
            self.row_bytes,
        )

    def right(self) -> bool:
        """Whether every pool is as NumPy has it."""
        found = self.device.pinned(self.pools.shape[1:], np.uint8)
        for place, pool in zip(self.pool_places, self.pools, strict=True):
            self.device.download(found, place)
            self.device.synchronize()
            if not np.array_equal(found, pool):
                return False
        return True

    def _upload(self, array: NDArray[Any]) -> int:
        place = self.device.allocate(array.nbytes)
        self.device.upload(place, array)
        self.device.synchronize()
        return place


def main() -> None:
    """Check rows of several widths; time the writes of one decode step."""
    result: dict[str, Any] = {"device": "cuda"}
    free = []
    for _ in range(2):
        device = CudaDevice()
        free.append(device.free_memory())
        for row_bytes in (1152, 24, 36, 6):
            case = Case(device, row_bytes, 64)
            case.choose(0)
            case.write()
            at_once = case.right()
            graph = device.record(case.write)
            unchanged = case.right()
            replays = []
            for seed in (1, 2):
                case.choose(seed)
                device.launch(graph)
                replays.append(case.right())
            result[f"rows_of_{row_bytes}"] = {
                "at_once": at_once,
                "recording_ran_nothing": unchanged,
                "replayed": replays,
            }
            if row_bytes == 1152:
                result["us_per_write"] = round(microseconds(device, graph), 2)
        device.close()
    result["free_bytes_before"] = free  # equal if closing gave all of it back
    print(json.dumps(result))


def microseconds(device: CudaDevice, graph: Any, count: int = 500) -> float:
    """Mean time of one replay, launches included."""
    device.launch(graph)
    device.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        device.launch(graph)
    device.synchronize()
    return (time.perf_counter() - started) / count * 1e6


if __name__ == "__main__":
    main()
