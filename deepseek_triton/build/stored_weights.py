"""Initializers of an exported model, changed where they are stored: in it or in files beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable
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
"""Holds what was rearranged; the exporter's file keeps what is as it was."""

CHUNK_BYTES = 32 << 20
"""About what is worked on at a time."""

_ALIGNMENT = 4096
_FOUR_BITS = (onnx.TensorProto.UINT4, onnx.TensorProto.INT4)


class StoredWeights:
    """Reads and rewrites initializers of `graph`, whose data files are in `folder`."""

    def __init__(self, graph: onnx.GraphProto, folder: Path) -> None:
        self.graph = graph
        self._folder = folder
        self._tensors: dict[str, onnx.TensorProto] = {t.name: t for t in graph.initializer}
        self.bar = tqdm(desc="rearrange weights", unit="B", unit_scale=True, disable=None)

    def close(self) -> None:
        """End the progress bar."""
        self.bar.close()

    def tensor(self, name: str) -> onnx.TensorProto:
        """Return the initializer `name`."""
        tensor: onnx.TensorProto = self._tensors[name]
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the initializer `name`."""
        return tuple(self._tensors[name].dims)

    def reshape(self, name: str, shape: Iterable[int]) -> None:
        """Give `name` another shape over the same bytes."""
        replace(self._tensors[name].dims, list(shape))

    def add(self, tensor: onnx.TensorProto) -> None:
        """Add an initializer to the graph."""
        added = self.graph.initializer.add()
        added.CopyFrom(tensor)
        self._tensors[tensor.name] = added

    def data(self, tensor: onnx.TensorProto) -> NDArray[np.uint8]:
        """Return the bytes of a tensor: a writable map of its file, or a copy."""
        four = tensor.data_type in _FOUR_BITS
        bits = 4 if four else 8 * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
        length = -(-math.prod(tensor.dims) * bits // 8)
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            return np.frombuffer(bytearray(tensor.raw_data), np.uint8)
        entries = {entry.key: entry.value for entry in tensor.external_data}
        path, offset = self._folder / entries["location"], int(entries.get("offset", 0))
        if path.stat().st_size < offset + length:
            raise BuildError(f"{path.name}: too short for {tensor.name}")
        return np.memmap(path, np.uint8, "r+", offset, (length,))

    def store(self, tensor: onnx.TensorProto, data: NDArray[np.uint8]) -> None:
        """Keep what was changed in the result of `data`."""
        if isinstance(data, np.memmap):
            data.flush()
        else:
            tensor.raw_data = data.tobytes()

    def replace_data(self, tensor: onnx.TensorProto, blocks: Iterable[NDArray[Any]]) -> None:
        """Give a tensor the bytes of `blocks`: inside the model if it was, else in EXTRA_FILE."""
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            tensor.raw_data = b"".join(block.tobytes() for block in blocks)
            return
        with (self._folder / EXTRA_FILE).open("ab") as file:
            offset = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
            file.write(bytes(offset - file.tell()))
            for block in blocks:
                # As bytes: bfloat16 is no type that a buffer knows.
                file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
                self.bar.update(block.nbytes)
            length = file.tell() - offset
        entries = {"location": EXTRA_FILE, "offset": offset, "length": length}
        replace(
            tensor.external_data,
            [onnx.StringStringEntryProto(key=k, value=str(v)) for k, v in entries.items()],
        )
