"""Weights of a portable model rewritten for TensorRT, in bounded memory.

The engine keeps a copy of its own, so the files beside the model may be changed at will.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper
from tqdm import tqdm

from deepseek_triton.build.graph_passes import replace
from deepseek_triton.errors import BuildError

EXTRA_FILE = "weights_extra.bin"
_CHUNK_BYTES = 32 << 20
_ALIGNMENT = 4096
_SIGN = 0x88  # the top bit of both codes in a byte: 0 … 15 becomes −8 … 7
_CODES = (onnx.TensorProto.UINT4, onnx.TensorProto.INT4)


class WeightEditor:
    """Edits initializers of `graph`, inside the model or in files of `folder`."""

    def __init__(self, graph: onnx.GraphProto, folder: Path) -> None:
        self._graph = graph
        self._folder = folder
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        self._bar = tqdm(desc="rearrange weights", unit="B", unit_scale=True, disable=None)

    def close(self) -> None:
        """End the progress bar."""
        self._bar.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the initializer `name`."""
        return tuple(self._tensors[name].dims)

    def reshape(self, name: str, shape: tuple[int, ...]) -> None:
        """Give `name` another shape over the same bytes."""
        replace(self._tensors[name].dims, shape)

    def make_signed(self, name: str) -> None:
        """Turn UINT4 codes 0 … 15 into INT4 codes −8 … 7, in place; INT4 ones stay."""
        tensor = self._tensors[name]
        if tensor.data_type == onnx.TensorProto.UINT4:
            tensor.data_type = onnx.TensorProto.INT4
            data = self._bytes(tensor)
            for start in range(0, data.size, _CHUNK_BYTES):
                data[start : start + _CHUNK_BYTES] ^= _SIGN
                self._bar.update(min(_CHUNK_BYTES, data.size - start))
            self._store(tensor, data)

    def swap_first_axes(self, name: str) -> None:
        """Turn [E, D, F] into [D, E·F]; rows of F must fill whole bytes."""
        tensor = self._tensors[name]
        experts, rows, columns = tensor.dims
        data = self._bytes(tensor).reshape(experts, rows, -1)
        step = max(1, _CHUNK_BYTES // (experts * data.shape[2]))

        def blocks() -> Iterator[NDArray[Any]]:
            for start in range(0, rows, step):
                yield data[:, start : start + step].swapaxes(0, 1)

        replace(tensor.dims, [rows, experts * columns])
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            self._append(tensor, blocks())
        else:
            tensor.raw_data = b"".join(block.tobytes() for block in blocks())

    def add_shifts(self, name: str, scales: str, zero_points: str) -> str:
        """Add (8 − zero point) · scale [N, G], of the type of the scales; return its name."""
        if name not in self._tensors:
            scale_tensor, point_tensor = self._tensors[scales], self._tensors[zero_points]
            dtype = helper.tensor_dtype_to_np_dtype(scale_tensor.data_type)
            values = self._bytes(scale_tensor).view(dtype)
            packed = self._bytes(point_tensor)
            tensor = self._graph.initializer.add()
            tensor.CopyFrom(scale_tensor)
            tensor.name = name
            self._tensors[name] = tensor
            step = _CHUNK_BYTES // 8

            def blocks() -> Iterator[NDArray[Any]]:
                for start in range(0, values.size, step):  # an even number, so whole bytes
                    part = packed[start // 2 : (start + step) // 2]
                    points = np.stack([part & 15, part >> 4], axis=1).reshape(-1)
                    scale = values[start : start + step].astype(np.float32)
                    shift = (8.0 - points[: scale.size].astype(np.float32)) * scale
                    yield shift.astype(dtype).view(np.uint8)

            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                self._append(tensor, blocks())
            else:
                tensor.raw_data = b"".join(block.tobytes() for block in blocks())
        return name

    def _bytes(self, tensor: onnx.TensorProto) -> NDArray[np.uint8]:
        """Return the bytes of a tensor: a writable map of its file, or a copy."""
        bits = 4 if tensor.data_type in _CODES else 8 * _itemsize(tensor)
        length = -(-math.prod(tensor.dims) * bits // 8)
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            return np.frombuffer(bytearray(tensor.raw_data), np.uint8)
        entries = {entry.key: entry.value for entry in tensor.external_data}
        path, offset = self._folder / entries["location"], int(entries.get("offset", 0))
        if path.stat().st_size < offset + length:
            raise BuildError(f"{path.name}: too short for {tensor.name}")
        return np.memmap(path, np.uint8, "r+", offset, (length,))

    def _store(self, tensor: onnx.TensorProto, data: NDArray[np.uint8]) -> None:
        if isinstance(data, np.memmap):
            data.flush()
        else:
            tensor.raw_data = data.tobytes()

    def _append(self, tensor: onnx.TensorProto, blocks: Iterator[NDArray[Any]]) -> None:
        """Write `blocks` at the end of the extra file and point `tensor` there."""
        with (self._folder / EXTRA_FILE).open("ab") as file:
            offset = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
            file.write(bytes(offset - file.tell()))
            for block in blocks:
                file.write(np.ascontiguousarray(block).data)
                self._bar.update(block.nbytes)
            length = file.tell() - offset
        entries = {"location": EXTRA_FILE, "offset": offset, "length": length}
        replace(
            tensor.external_data,
            [onnx.StringStringEntryProto(key=k, value=str(v)) for k, v in entries.items()],
        )


def _itemsize(tensor: onnx.TensorProto) -> int:
    return int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
