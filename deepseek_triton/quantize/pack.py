"""Writing INT4 weights as compressed-tensors does in its format "pack-quantized".

For a linear layer `m`, weight [N, K], G groups a row:

    m.weight_packed      int32 [N, ceil(K/8)]   eight codes a word along K, the lowest first
    m.weight_scale       float [N, G]
    m.weight_zero_point  int32 [ceil(N/8), G]   eight zero points a word along N; asymmetric only
    m.weight_shape       int64 [2]              N, K

Codes and zero points are stored unsigned, 0 … 15: value + 8 of the signed numbers that it computes
with. https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.quantize.int4 import Int4Weight, pack_nibbles

_IN_WORD = 8  # 4-bit values


def pack_words(values: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return `values` [R, C] of 0 … 15 as words [R, ceil(C/8)], padded with zeros.

    The inverse of int4.unpack_words, but for the padding.
    """
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % _IN_WORD)))
    return pack_nibbles(padded).view("<i4")


def packed_tensors(
    module: str, weight: Int4Weight, scale_dtype: np.dtype[Any]
) -> dict[str, NDArray[Any]]:
    """Return the tensors of the linear layer `module`, by name."""
    tensors: dict[str, NDArray[Any]] = {
        f"{module}.weight_packed": pack_words(weight.codes),
        f"{module}.weight_scale": weight.scales.astype(scale_dtype),
    }
    if weight.zero_points is not None:
        words = pack_words(np.ascontiguousarray(weight.zero_points.T))
        tensors[f"{module}.weight_zero_point"] = np.ascontiguousarray(words.T)
    tensors[f"{module}.weight_shape"] = np.array(weight.shape, np.int64)
    return tensors


def packed_nbytes(
    shape: tuple[int, int], group_size: int, *, symmetric: bool, scale_itemsize: int
) -> int:
    """Return the bytes of `packed_tensors` for a weight [N, K] in groups that fill K."""
    rows, columns = shape
    groups = columns // group_size
    zeros = 0 if symmetric else -(-rows // _IN_WORD) * groups * 4
    return rows * -(-columns // _IN_WORD) * 4 + rows * groups * scale_itemsize + zeros + 2 * 8


def quantization_config(
    group_size: int, *, symmetric: bool, ignore: Sequence[str]
) -> dict[str, Any]:
    """Return config.json's `quantization_config`; `ignore` names the linear layers left alone."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
