"""INT4 layers as AutoGPTQ and GPTQModel store them.

For a linear layer `m`, weight [N, K], G = ceil(K / group_size) groups:

    m.qweight  int32 [K/8, N]   eight codes a word along K, the first in the low bits
    m.qzeros   int32 [G, N/8]   zero points, along N; minus 1 unless checkpoint_format is "gptq_v2"
    m.scales   float [G, N]
    m.g_idx    int32 [K]        group of each input; absent: k // group_size

value[n, k] = (code − zero point) · scale of the group g_idx[k]. With desc_act ("act-order") the
groups are made of inputs that lie anywhere. https://github.com/ModelCloud/GPTQModel
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.checkpoint.fields import Fields, describe
from deepseek_triton.checkpoint.reader import CheckpointReader, CheckpointTensor
from deepseek_triton.errors import UnsupportedModelError
from deepseek_triton.quantize.act_order import input_order
from deepseek_triton.quantize.int4 import SYMMETRIC_ZERO, Int4Linear, unpack_words
from deepseek_triton.quantize.parts import WORDS, sources, take, take_scales

_ROWS = 64  # of N that are unpacked at a time, so that they stay in the processor's cache


def present_gptq(reader: CheckpointReader, config: Fields) -> None:
    """Present the INT4 layers of a GPTQ checkpoint.

    `config` is config.json's quantization_config. Raises UnsupportedModelError for another layout
    and CheckpointError for parts that do not belong together.
    """
    layout = config.optional_string("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise UnsupportedModelError(
            f"{config.where}: checkpoint_format {describe(layout)} is not supported; "
            'supported are "gptq" and "gptq_v2"'
        )
    for rule in config.object("dynamic"):
        if not rule.startswith("-:"):  # layers left alone need no rule: their files tell
            raise UnsupportedModelError(
                f"{config.where}: dynamic {describe(rule)}: settings for single layers are not "
                "supported"
            )
    stored_group = config.integer("group_size", 128, minimum=-1)
    for source in tuple(sources(reader, ".qweight")):
        group = stored_group if stored_group > 0 else None
        zero_offset = 1 if layout == "gptq" else 0
        reader.put_int4(source, _layer(reader, source, group, zero_offset, config))


def _layer(
    reader: CheckpointReader, source: str, group: int | None, zero_offset: int, config: Fields
) -> Int4Linear:
    words = take(reader, f"{source}.qweight", WORDS)
    columns, outputs = 8 * words.shape[0], words.shape[1]
    group = columns if group is None else group
    groups = -(-columns // group)
    zeros = take(reader, f"{source}.qzeros", WORDS, (groups, -(-outputs // 8)))
    scales = take_scales(reader, f"{source}.scales", (groups, outputs), transposed=True)
    order = None
    if f"{source}.g_idx" in reader:
        index = take(reader, f"{source}.g_idx", WORDS, (columns,))
        order = input_order(f"{index.file}: tensor {source}.g_idx", index.read(), group)
    stored = _Stored(words, zeros, zero_offset, order)
    symmetric = config.boolean("sym", False) and bool(
        np.all(stored.unpacked_zero_points() == SYMMETRIC_ZERO)
    )
    return Int4Linear(
        name=source,
        file=words.file,
        shape=(outputs, columns),
        group_size=group,
        symmetric=symmetric,
        input_order=order,
        codes=stored.codes,
        scales=scales,
        zero_points=(lambda: None) if symmetric else stored.unpacked_zero_points,
    )


@dataclass(frozen=True)
class _Stored:
    words: CheckpointTensor
    zeros: CheckpointTensor
    zero_offset: int
    order: NDArray[np.int32] | None

    def codes(self) -> NDArray[np.uint8]:
        words = self.words.read()
        codes = np.empty((words.shape[1], 8 * len(words)), np.uint8)
        for start in range(0, len(codes), _ROWS):
            part = slice(start, start + _ROWS)
            rows = unpack_words(words[:, part].T)
            codes[part] = rows if self.order is None else rows[:, self.order]
        return codes

    def unpacked_zero_points(self) -> NDArray[np.uint8]:
        zeros = unpack_words(self.zeros.read())[:, : self.words.shape[1]]
        # 15 is stored for 0 as well as for 16; kernels keep the low four bits, and so 0.
        return np.ascontiguousarray((zeros + np.uint8(self.zero_offset)).T & np.uint8(15))
