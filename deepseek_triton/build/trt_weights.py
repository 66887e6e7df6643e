"""Weights of a portable model rewritten for TensorRT, in bounded memory.

The engine keeps a copy of its own, so the files beside the model may be changed at will.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from deepseek_triton.build.graph_passes import replace
from deepseek_triton.build.stored_weights import CHUNK_BYTES, StoredWeights

_SIGN = 0x88  # the top bit of both codes in a byte: 0 … 15 becomes −8 … 7


class WeightEditor(StoredWeights):
    """Turns the exporter's INT4 weights into TensorRT's."""

    def make_signed(self, name: str) -> None:
        """Turn UINT4 codes 0 … 15 into INT4 codes −8 … 7, in place; INT4 ones stay."""
        tensor = self._tensors[name]
        if tensor.data_type == onnx.TensorProto.UINT4:
            tensor.data_type = onnx.TensorProto.INT4
            data = self.data(tensor)
            for start in range(0, data.size, CHUNK_BYTES):
                data[start : start + CHUNK_BYTES] ^= _SIGN
                self.bar.update(min(CHUNK_BYTES, data.size - start))
            self.store(tensor, data)

    def swap_first_axes(self, name: str) -> None:
        """Turn [E, D, F] into [D, E·F]; rows of F must fill whole bytes."""
        tensor = self._tensors[name]
        experts, rows, columns = tensor.dims
        data = self.data(tensor).reshape(experts, rows, -1)
        step = max(1, CHUNK_BYTES // (experts * data.shape[2]))

        def blocks() -> Iterator[NDArray[Any]]:
            for start in range(0, rows, step):
                yield data[:, start : start + step].swapaxes(0, 1)

        replace(tensor.dims, [rows, experts * columns])
        self.replace_data(tensor, blocks())

    def add_shifts(self, name: str, scales: str, zero_points: str) -> str:
        """Add (8 − zero point) · scale [N, G], of the type of the scales; return its name."""
        if name not in self._tensors:
            scale_tensor, point_tensor = self._tensors[scales], self._tensors[zero_points]
            dtype = helper.tensor_dtype_to_np_dtype(scale_tensor.data_type)
            values = self.data(scale_tensor).view(dtype)
            packed = self.data(point_tensor)
            tensor = self.graph.initializer.add()
            tensor.CopyFrom(scale_tensor)
            tensor.name = name
            self._tensors[name] = tensor
            step = CHUNK_BYTES // 8

            def blocks() -> Iterator[NDArray[Any]]:
                for start in range(0, values.size, step):  # an even number, so whole bytes
                    part = packed[start // 2 : (start + step) // 2]
                    points = np.stack([part & 15, part >> 4], axis=1).reshape(-1)
                    scale = values[start : start + step].astype(np.float32)
                    shift = (8.0 - points[: scale.size].astype(np.float32)) * scale
                    yield shift.astype(dtype).view(np.uint8)

            self.replace_data(tensor, blocks())
        return name
