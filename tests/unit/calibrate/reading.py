"""Quantised checkpoints read without the package: safetensors and bit arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open


def raw_tensors(folder: Path) -> dict[str, NDArray[Any]]:
    """Every tensor of a checkpoint, by name."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def weight_of(tensors: dict[str, NDArray[Any]], module: str, group: int) -> NDArray[np.float32]:
    """The values of a linear layer in compressed-tensors' pack-quantized form."""
    rows, columns = tensors[f"{module}.weight_shape"].tolist()
    words = tensors[f"{module}.weight_packed"].astype(np.int64)
    codes = (words[:, :, None] >> np.arange(0, 32, 4)) & 15
    signed = codes.reshape(rows, -1)[:, :columns] - 8
    scales = np.repeat(tensors[f"{module}.weight_scale"].astype(np.float32), group, axis=1)
    zeros: Any = 0
    if f"{module}.weight_zero_point" in tensors:
        packed = tensors[f"{module}.weight_zero_point"].astype(np.int64)
        by_row = (packed[:, None, :] >> np.arange(0, 32, 4)[None, :, None]) & 15
        zeros = np.repeat(by_row.reshape(-1, packed.shape[1])[:rows] - 8, group, axis=1)
    values: NDArray[np.float32] = (signed - zeros).astype(np.float32) * scales
    return values
