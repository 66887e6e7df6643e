"""Round-to-nearest quantisation to 4 bits, by row and group of input channels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.errors import ConfigError
from deepseek_triton.quantize.int4 import SYMMETRIC_ZERO, Int4Weight

_LEVELS = 15  # the largest code
_SMALLEST = 2.0**-24  # of a scale: of float16, and far below any that matters


def quantize_rtn(
    weight: NDArray[np.float32],
    group_size: int,
    *,
    symmetric: bool,
    scale_dtype: np.dtype[Any],
    clip: NDArray[np.float32] | None = None,
) -> Int4Weight:
    """Round `weight` [N, K] to the nearest of 16 levels a group.

    The levels span a group's values, 0 included; symmetric ones span −max|w| … max|w|, with 0 at
    code 8. `clip` [N, G] in (0, 1] shrinks the span. Scales are rounded to `scale_dtype`, in which
    they will be stored, before the codes are chosen. Raises ConfigError unless groups fill K.
    """
    grouped = split_groups(weight, group_size)
    low, high = span(grouped, symmetric)
    if clip is not None:
        low, high = low * clip, high * clip
    codes, scales, zeros = encode(grouped, low, high, symmetric, scale_dtype)
    return Int4Weight(codes.reshape(weight.shape), scales, None if symmetric else zeros, group_size)


def split_groups(weight: NDArray[Any], group_size: int) -> NDArray[Any]:
    """Return `weight` [N, K] as [N, G, group_size]; raises ConfigError unless groups fill K."""
    rows, columns = weight.shape
    if columns % group_size:
        raise ConfigError(
            f"GROUP: groups of {group_size} do not fill {columns} input channels; "
            "choose a divisor of them"
        )
    return weight.reshape(rows, columns // group_size, group_size)


def span(
    grouped: NDArray[np.float32], symmetric: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the lowest and the highest value [N, G] that the levels have to reach."""
    if symmetric:
        high = np.abs(grouped).max(axis=-1)
        return -high, high
    return np.minimum(grouped.min(axis=-1), 0), np.maximum(grouped.max(axis=-1), 0)


def encode(
    grouped: NDArray[np.float32],
    low: NDArray[np.float32],
    high: NDArray[np.float32],
    symmetric: bool,
    scale_dtype: np.dtype[Any],
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
    """Return codes [N, G, group_size], scales [N, G] and zero points [N, G]."""
    scales = np.maximum((high - low) / _LEVELS, _SMALLEST).astype(scale_dtype).astype(np.float32)
    if symmetric:
        zeros = np.full(scales.shape, SYMMETRIC_ZERO, np.float32)
    else:
        zeros = np.clip(np.rint(-low / scales), 0, _LEVELS)
    codes = np.rint(grouped / scales[..., None])
    codes += zeros[..., None]
    np.clip(codes, 0, _LEVELS, out=codes)
    return codes.astype(np.uint8), scales, zeros.astype(np.uint8)
