"""DeepSeek's FP8 weights: float8 e4m3 with one float32 scale for each block of 128 × 128.

value[n, k] = weight[n, k] · weight_scale_inv[n // 128, k // 128] (arXiv 2412.19437, section 3.3);
the last blocks of rows and columns may be partial. Tensors without the suffix are not quantised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from deepseek_triton.checkpoint.fields import Fields, describe
from deepseek_triton.checkpoint.reader import (
    Block,
    CheckpointReader,
    CheckpointTensor,
    check_scales,
)
from deepseek_triton.errors import CheckpointError, UnsupportedModelError

_SCALE_SUFFIX = "_scale_inv"
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_FLOAT32 = np.dtype(np.float32)
_BIAS = np.float32(2.0**120)  # float32's exponent bias 127 against 7
_NAN = np.int8(0x7F)


def present_fp8(reader: CheckpointReader, config: Fields) -> None:
    """Put float32 tensors in place of the FP8 ones of `reader`; each is computed when it is read.

    `config` is config.json's quantization_config. Raises UnsupportedModelError for another kind of
    FP8 and CheckpointError for a scale that is missing or misshapen.
    """
    block = _block_size(config)
    for name in reader.names():
        if name in reader and reader.dtype(name) == _FP8:
            _present(reader, name, block)


def dequantize_fp8(
    weight: NDArray[Any], scales: NDArray[Any], block: tuple[int, int], place: slice = slice(None)
) -> NDArray[np.float32]:
    """Return weight [N, K] float8 · scales [⌈N/rows⌉, ⌈K/columns⌉], `block` = (rows, columns).

    Of all rows or of those in `place`, a slice without a step.
    """
    rows, columns = block
    start, stop, _ = place.indices(len(weight))
    values = np.empty((stop - start, weight.shape[1]), np.float32)
    codes = weight[place].view(np.int8)
    for index in range(start // rows, -(-stop // rows)):
        scale = np.asarray(scales[index], np.float32)
        part = slice(max(0, index * rows - start), (index + 1) * rows - start)
        # The fields of the code, moved to where float32 has them: twice as fast as a conversion.
        bits = values[part].view(np.uint32)
        bits[...] = codes[part]
        bits <<= np.uint32(20)
        bits &= np.uint32(0x87F00000)
        values[part] *= _BIAS
        if (nan := codes[part] & _NAN == _NAN).any():
            values[part][nan] = np.nan
        values[part] *= np.repeat(scale, columns)[: weight.shape[1]]
    return values


def _block_size(config: Fields) -> tuple[int, int]:
    if config.optional_string("fmt") not in (None, "e4m3"):
        raise UnsupportedModelError(
            f"{config.where}: fmt {describe(config.values['fmt'])} is not supported, only e4m3 is"
        )
    block = config.values.get("weight_block_size")
    if block is None:
        raise UnsupportedModelError(
            f"{config.where}: FP8 weights without weight_block_size are not supported; "
            "use DeepSeek's own FP8 or bfloat16 checkpoint"
        )
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise config.error("weight_block_size", f"must be two sizes, found {describe(block)}")
    return sizes[0], sizes[1]


def _present(reader: CheckpointReader, name: str, block: tuple[int, int]) -> None:
    file, shape = reader.file(name), reader.shape(name)
    if name + _SCALE_SUFFIX not in reader:
        raise CheckpointError(
            f"{file}: tensor {name} is FP8, but its scales {name + _SCALE_SUFFIX} are missing; "
            "the download may be incomplete"
        )
    expected = tuple(-(-size // step) for size, step in zip(shape, block, strict=False))
    found = reader.shape(name + _SCALE_SUFFIX)
    if len(shape) != 2 or found != expected:
        raise CheckpointError(
            f"{reader.file(name + _SCALE_SUFFIX)}: tensor {name + _SCALE_SUFFIX} has shape "
            f"{list(found)}, {list(expected)} belongs to {name} {list(shape)}"
        )
    weight, scales = reader.take(name), reader.take(name + _SCALE_SUFFIX)
    stored = _Stored(name, weight, scales, block)
    tensor = CheckpointTensor(weight.file, _FLOAT32, weight.shape, stored.read, stored.blocks)
    reader.put(name, tensor)


@dataclass(frozen=True)
class _Stored:
    name: str
    weight: CheckpointTensor
    scales: CheckpointTensor
    block: tuple[int, int]

    def read(self) -> NDArray[np.float32]:
        return dequantize_fp8(self.weight.read(), self._factors(), self.block)

    def blocks(self, rows: int) -> Iterator[Block]:
        codes, factors = self.weight.read(), self._factors()
        for start in range(0, len(codes), rows):
            place = slice(start, start + rows)
            yield partial(dequantize_fp8, codes, factors, self.block, place)

    def _factors(self) -> NDArray[Any]:
        factors = self.scales.read()
        check_scales(self.name + _SCALE_SUFFIX, self.scales.file, factors)
        return factors
