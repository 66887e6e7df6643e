"""The stored parts of INT4 layers, taken from a checkpoint with their types and shapes checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from deepseek_triton.checkpoint.reader import CheckpointReader, CheckpointTensor, check_scales
from deepseek_triton.errors import CheckpointError

WORDS = ("int32",)
FLOATS = ("float16", "bfloat16", "float32")


def sources(reader: CheckpointReader, suffix: str) -> Iterator[str]:
    """Yield the names of the layers that have a tensor called name + `suffix`."""
    for name in reader.names():
        if name.endswith(suffix):
            yield name.removesuffix(suffix)


def take(
    reader: CheckpointReader,
    name: str,
    dtypes: tuple[str, ...],
    shape: tuple[int, ...] | None = None,
) -> CheckpointTensor:
    """Take a matrix, or a tensor of `shape`, out of `reader`.

    Raises CheckpointError, naming it, if it is missing or another type or shape.
    """
    tensor = reader.take(name)
    if tensor.dtype.name not in dtypes:
        raise CheckpointError(
            f"{tensor.file}: tensor {name} is {tensor.dtype.name}, expected {' or '.join(dtypes)}"
        )
    if len(tensor.shape) != 2 if shape is None else tensor.shape != shape:
        expected = "two dimensions" if shape is None else list(shape)
        raise CheckpointError(
            f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, expected {expected}"
        )
    return tensor


def take_scales(
    reader: CheckpointReader, name: str, shape: tuple[int, int], *, transposed: bool = False
) -> Callable[[], NDArray[np.float32]]:
    """Take the scales [N, G] out of `reader`, which holds them in `shape`; return their reading.

    `transposed`: they are stored as [G, N]. Raises CheckpointError as `take` does; reading them
    does if one is not finite.
    """
    return partial(_read_scales, name, take(reader, name, FLOATS, shape), transposed)


def _read_scales(name: str, tensor: CheckpointTensor, transposed: bool) -> NDArray[np.float32]:
    stored = tensor.read()
    scales = _as_float32(stored.T if transposed else stored)
    check_scales(name, tensor.file, scales.T if transposed else scales)
    return scales


def _as_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """Return `values` as a contiguous array of float32, in which all of FLOATS are exact."""
    if values.dtype == ml_dtypes.bfloat16:  # a shift, which is much faster than the conversion
        bits = np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32)
    return np.ascontiguousarray(values, np.float32)
