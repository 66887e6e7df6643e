"""Weights from the mapped file to the device, through two pinned buffers in turn."""

from __future__ import annotations

import logging
import math
import mmap
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from deepseek_triton.errors import ConfigError
from deepseek_triton.runner.cuda_program import (
    FoldedTensor,
    Program,
    StoredTensor,
    map_weights,
    numpy_dtype,
)

logger = logging.getLogger(__name__)

_STAGING_BYTES = 256 << 20
_SLOW_BYTES = 4 << 30  # loading more than this takes seconds: show a bar
_INT64, _UINT4 = 7, 21  # onnx.TensorProto.DataType


class _Staging:
    """Copies host bytes to a device: while one pinned buffer travels, the other one is filled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = 0
        if device.type == "cuda":
            self._buffers = [
                torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            ]
            self._sent = [torch.cuda.Event() for _ in range(2)]

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy bytes [n] uint8 on the host into `target` [n] on the device."""
        if self._device.type != "cuda":
            target.copy_(source)
            return
        for begin in range(0, len(source), _STAGING_BYTES):
            part = source[begin : begin + _STAGING_BYTES]
            buffer = self._buffers[self._turn][: len(part)]
            self._sent[self._turn].synchronize()
            buffer.copy_(part)  # PyTorch copies with all its threads
            target[begin : begin + len(part)].copy_(buffer, non_blocking=True)
            self._sent[self._turn].record()
            self._turn ^= 1


def load_weights(
    program: Program, device: torch.device, unpacked: Collection[str] = ()
) -> dict[str, Any]:
    """Return every tensor of `program` on `device`; int64 constants stay NumPy arrays on the host.

    4-bit tensors [..., K] become uint8 [..., K/2], the low nibble first; those named in `unpacked`
    become one uint8 an element.

    Raises:
        EngineMismatchError: the weights file is missing or too short.
        ConfigError: the device's memory does not hold them.
    """
    started, total = time.perf_counter(), sum(t.nbytes for t in program.tensors.values())
    mapped, staging = map_weights(program), _Staging(device)
    values: dict[str, Any] = {}

    def load(tensor: StoredTensor) -> Any:
        return _load(tensor, mapped, staging, device, tensor.name in unpacked)

    bar = tqdm(
        total=total,
        desc="load weights",
        unit="B",
        unit_scale=True,
        disable=True if total < _SLOW_BYTES else None,
    )
    try:
        with bar:
            for name, tensor in program.tensors.items():
                if isinstance(tensor, FoldedTensor):
                    values[name] = _load_folded(tensor, load)
                else:
                    values[name] = load(tensor)
                bar.update(tensor.nbytes)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{program.weights_path}: {total:,} bytes of weights do not fit into the memory of "
            f"{device}; use a GPU with more memory or quantise the model ({error})"
        ) from error
    seconds = time.perf_counter() - started
    logger.info("loaded %.1f GB of weights in %.1f s", total / 1e9, seconds)
    return values


def _load(
    tensor: StoredTensor,
    mapped: mmap.mmap | None,
    staging: _Staging,
    device: torch.device,
    unpack: bool,
) -> Any:
    if tensor.value is not None:
        if tensor.onnx_type == _INT64:
            return tensor.value
        raw = _packed(tensor.value) if tensor.onnx_type == _UINT4 else np.array(tensor.value)
        raw = raw.reshape(-1).view(np.uint8)
    else:
        raw = np.frombuffer(mapped or b"", np.uint8, tensor.nbytes, tensor.offset)
    target = torch.empty(len(raw), dtype=torch.uint8, device=device)
    staging.copy(torch.from_numpy(raw), target)
    if tensor.onnx_type != _UINT4:
        return target.view(getattr(torch, numpy_dtype(tensor.onnx_type).name)).view(tensor.shape)
    if not unpack:
        return target.view(*tensor.shape[:-1], tensor.shape[-1] // 2)
    codes = torch.stack((target & 15, target >> 4), dim=-1).flatten()
    return codes[: math.prod(tensor.shape)].view(tensor.shape)


def _packed(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Two 4-bit values a byte, as the weights file holds them."""
    flat = values.astype(np.uint8).reshape(-1)
    flat = np.append(flat, np.zeros(len(flat) % 2, np.uint8))
    return (flat[0::2] | flat[1::2] << 4).astype(np.uint8)


def _load_folded(tensor: FoldedTensor, load: Callable[[StoredTensor], Tensor]) -> Tensor:
    shared = load(tensor.shared)
    routed = load(tensor.routed)
    count, rows, columns = routed.shape
    if tensor.by_rows:  # gate rows, then up rows: [2, S, F, columns]
        by_expert = shared.view(2, -1, rows // 2, columns).permute(1, 2, 0, 3)
    else:
        by_expert = shared.view(rows, -1, columns).permute(1, 0, 2)
    by_expert = by_expert.reshape(-1, rows, columns)
    return torch.cat((routed, by_expert))
