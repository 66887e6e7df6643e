"""INT4 layers as compressed-tensors stores them in its format "pack-quantized".

For a linear layer `m`, weight [N, K], G = ceil(K / group_size) groups:

    m.weight_packed      int32 [N, ceil(K/8)]  eight codes a word along K, the first in its low bits
    m.weight_scale       float [N, G]
    m.weight_zero_point  int32 [ceil(N/8), G]  packed along N, or int8 [N, G]; asymmetric only
    m.weight_shape       int64 [2]             N, K
    m.weight_g_idx       int32 [K]             with actorder "group": the group of each input

value = (code − zero point) · scale, both of them signed; packed, 8 is added to each.
https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.checkpoint.fields import Fields, describe
from deepseek_triton.checkpoint.reader import CheckpointReader, CheckpointTensor
from deepseek_triton.errors import CheckpointError, UnsupportedModelError
from deepseek_triton.quantize.act_order import input_order
from deepseek_triton.quantize.int4 import SYMMETRIC_ZERO, Int4Linear, unpack_words
from deepseek_triton.quantize.parts import WORDS, sources, take, take_scales

_FORMAT = "pack-quantized"


@dataclass(frozen=True)
class _Scheme:
    """How the layers that `targets` name are quantised."""

    targets: tuple[str, ...]
    group_size: int | None  # None: one group a row
    symmetric: bool
    ordered: bool  # whether inputs are assigned to groups one by one


def present_compressed_tensors(reader: CheckpointReader, config: Fields) -> None:
    """Present the INT4 layers of a compressed-tensors checkpoint.

    `config` is config.json's quantization_config. Raises UnsupportedModelError for another format
    and CheckpointError for parts that do not belong together.
    """
    groups = config.object("config_groups")
    schemes = [_scheme(config, name) for name in groups]
    ignore = _strings(config, "ignore")
    for source in tuple(sources(reader, ".weight_packed")):
        if _matching(source, ignore):
            file = reader.file(f"{source}.weight_packed")
            raise CheckpointError(f"{file}: {source} is INT4, but {config.where}: ignore names it")
        reader.put_int4(source, _layer(reader, source, _scheme_of(source, schemes, config)))


def _scheme(config: Fields, name: str) -> _Scheme:
    group = Fields(config.object("config_groups"), f"{config.where}: config_groups").object(name)
    fields = Fields(group, f"{config.where}: config_groups: {name}")
    layout = fields.optional_string("format") or config.optional_string("format")
    if layout != _FORMAT:
        raise UnsupportedModelError(
            f'{fields.where}: format {describe(layout)} is not supported, only "{_FORMAT}" is'
        )
    if fields.has("input_activations"):
        raise UnsupportedModelError(
            f"{fields.where}: input_activations: quantised activations are not supported"
        )
    weights = Fields(fields.object("weights"), f"{fields.where}: weights")
    strategy = weights.optional_string("strategy") or "channel"
    wanted = {"num_bits": (4,), "type": ("int", None), "strategy": ("group", "channel")}
    for key, allowed in wanted.items():
        value = weights.values.get(key) if key != "strategy" else strategy
        if value not in allowed:
            raise UnsupportedModelError(
                f"{weights.where}: {key} {describe(value)} is not supported; "
                f"it must be {' or '.join(describe(a) for a in allowed if a is not None)}"
            )
    return _Scheme(
        targets=_strings(fields, "targets"),
        group_size=weights.integer("group_size", 128) if strategy == "group" else None,
        symmetric=weights.boolean("symmetric", True),
        ordered=weights.values.get("actorder") in ("group", "dynamic"),
    )


def _strings(fields: Fields, key: str) -> tuple[str, ...]:
    values = fields.values.get(key)
    items = [] if values is None else values
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise fields.error(key, f"must be a list of names, found {describe(values)}")
    return tuple(items)


def _matching(source: str, patterns: Iterable[str]) -> int:
    """Return how well `patterns` name the layer: 3 by name, 2 by regular expression, 0 not."""
    best = 0
    for pattern in patterns:
        if pattern == source:
            best = 3
        elif pattern.startswith("re:") and re.match(pattern[3:], source):
            best = max(best, 2)
    return best


def _scheme_of(source: str, schemes: list[_Scheme], config: Fields) -> _Scheme:
    """Return the scheme that names the layer best: by name, by expression, by being a Linear."""

    def rank(scheme: _Scheme) -> int:
        return _matching(source, scheme.targets) or int("Linear" in scheme.targets)

    best = max(schemes, key=rank, default=None)
    if best is None or not rank(best):
        raise CheckpointError(f"{config.where}: config_groups: no targets name {source}")
    return best


def _layer(reader: CheckpointReader, source: str, scheme: _Scheme) -> Int4Linear:
    shape = take(reader, f"{source}.weight_shape", ("int64", "int32"), (2,))
    outputs, columns = (int(size) for size in shape.read())
    words = take(reader, f"{source}.weight_packed", WORDS, (outputs, -(-columns // 8)))
    group = scheme.group_size or columns
    groups = -(-columns // group)
    scales = take_scales(reader, f"{source}.weight_scale", (outputs, groups))
    zeros = None if scheme.symmetric else _zero_points(reader, source, (outputs, groups))
    order = None
    if scheme.ordered:
        index = take(reader, f"{source}.weight_g_idx", WORDS, (columns,))
        order = input_order(f"{index.file}: tensor {source}.weight_g_idx", index.read(), group)
    elif f"{source}.weight_g_idx" in reader:
        reader.take(f"{source}.weight_g_idx")
    return Int4Linear(
        name=source,
        file=words.file,
        shape=(outputs, columns),
        group_size=group,
        symmetric=zeros is None,
        input_order=order,
        codes=partial(_codes, words, columns, order),
        scales=scales,
        zero_points=(lambda: None) if zeros is None else partial(_unpack_zeros, zeros, outputs),
    )


def _zero_points(
    reader: CheckpointReader, source: str, per_group: tuple[int, int]
) -> CheckpointTensor:
    name, (outputs, groups) = f"{source}.weight_zero_point", per_group
    packed = name in reader and reader.dtype(name).name in WORDS
    return take(reader, name, (*WORDS, "int8"), (-(-outputs // 8), groups) if packed else per_group)


def _codes(
    words: CheckpointTensor, columns: int, order: NDArray[np.int32] | None
) -> NDArray[np.uint8]:
    codes = unpack_words(words.read())
    return codes[:, :columns] if order is None else codes[:, order]


def _unpack_zeros(zeros: CheckpointTensor, outputs: int) -> NDArray[np.uint8]:
    stored = zeros.read()
    if stored.dtype == np.int8:
        return (stored + np.int8(SYMMETRIC_ZERO)).astype(np.uint8)
    return np.ascontiguousarray(unpack_words(stored.T)[:, :outputs].T)
