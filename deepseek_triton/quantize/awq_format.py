"""INT4 layers as AutoAWQ stores them in its version "gemm".

For a linear layer `m`, weight [N, K], G = K / group_size groups:

    m.qweight  int32   [K, N/8]   eight codes a word along N, in the order 0 2 4 6 1 3 5 7
    m.qzeros   int32   [G, N/8]   zero points, in the same order
    m.scales   float16 [G, N]

value = (code − zero point) · scale. https://github.com/casper-hansen/AutoAWQ
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.checkpoint.fields import Fields, describe
from deepseek_triton.checkpoint.reader import CheckpointReader, CheckpointTensor
from deepseek_triton.errors import UnsupportedModelError
from deepseek_triton.quantize.int4 import Int4Linear
from deepseek_triton.quantize.parts import WORDS, sources, take, take_scales

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds the column _ORDER[i] of its eight
_WORDS = 64  # of a row that are unpacked at a time, so that they stay in the processor's cache


def present_awq(reader: CheckpointReader, config: Fields) -> None:
    """Present the INT4 layers of an AutoAWQ checkpoint.

    `config` is config.json's quantization_config. Raises UnsupportedModelError for another layout
    and CheckpointError for parts that do not belong together.
    """
    version = (config.optional_string("version") or "gemm").lower()
    if version != "gemm":
        raise UnsupportedModelError(
            f'{config.where}: AWQ version {describe(version)} is not supported, only "gemm" is'
        )
    stored_group = config.integer("group_size", 128, minimum=-1)
    for source in tuple(sources(reader, ".qweight")):
        words = take(reader, f"{source}.qweight", WORDS)
        columns, outputs = words.shape[0], 8 * words.shape[1]
        group = columns if stored_group < 1 else stored_group
        groups = -(-columns // group)
        zeros = take(reader, f"{source}.qzeros", WORDS, (groups, outputs // 8))
        scales = take_scales(reader, f"{source}.scales", (groups, outputs), transposed=True)
        layer = Int4Linear(
            name=source,
            file=words.file,
            shape=(outputs, columns),
            group_size=group,
            symmetric=False,
            input_order=None,
            codes=partial(_unpack, words),
            scales=scales,
            zero_points=partial(_unpack, zeros),
        )
        reader.put_int4(source, layer)


def _unpack(tensor: CheckpointTensor) -> NDArray[np.uint8]:
    """Return [N, K] codes of words [K, N/8]."""
    words = tensor.read()
    codes = np.empty((words.shape[1], 8, len(words)), np.uint8)
    for start in range(0, words.shape[1], _WORDS):
        part = slice(start, start + _WORDS)
        columns = np.ascontiguousarray(words[:, part].T).view(np.uint32)
        for nibble, place in enumerate(_ORDER):
            codes[part, place] = columns >> np.uint32(4 * nibble) & np.uint32(15)
    return codes.reshape(-1, len(words))
