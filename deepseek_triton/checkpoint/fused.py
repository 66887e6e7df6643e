"""Projections that a checkpoint stores as one weight, split by the layout that config.json states.

    self_attn.qkv_proj   qkv_layout
        "concatenated"   all heads of q, then of k, then of v                 (as in Phi-3)
        "grouped"        for each key-value head: its query heads, k, v       (Megatron, InternLM2)
    mlp.gate_up_proj     gate_up_layout
        "concatenated"   gate, then up
        "interleaved"    gate 0, up 0, gate 1, up 1, …

Nothing in the weights tells the layouts apart, so one that is not stated is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from numpy.typing import NDArray

from deepseek_triton.checkpoint.fields import Fields, describe
from deepseek_triton.checkpoint.reader import CheckpointReader, CheckpointTensor
from deepseek_triton.checkpoint.spec import GroupedQueryAttentionSpec, ModelSpec
from deepseek_triton.errors import CheckpointError, UnsupportedModelError

_QKV, _GATE_UP = ".qkv_proj", ".gate_up_proj"
_Part = tuple[str, int, Callable[[NDArray[Any]], NDArray[Any]]]  # name, rows, rows of the fused one


def split_fused(reader: CheckpointReader, spec: ModelSpec, config: Fields) -> None:
    """Put the separate projections in place of fused ones; they are views where rows lie together.

    `config` is config.json. Raises UnsupportedModelError if it does not state the layout of fused
    weights that are there, and CheckpointError for rows that do not fit the layout.
    """
    for name in reader.names():
        module, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            continue
        if module.endswith(_QKV):
            parts = _qkv_parts(spec, config, module)
        elif module.endswith(_GATE_UP):
            rows = reader.shape(name)[0]
            parts = _gate_up_parts(config, module, rows)
        else:
            continue
        if reader.int4(module) is not None:
            raise UnsupportedModelError(
                f"{reader.file(name)}: {module}: fused projections in INT4 are not supported"
            )
        _split(reader, name, kind, parts)


def _split(reader: CheckpointReader, name: str, kind: str, parts: list[_Part]) -> None:
    fused = reader.take(name)
    rows = sum(size for _, size, _ in parts)
    if not fused.shape or fused.shape[0] != rows:
        raise CheckpointError(
            f"{fused.file}: tensor {name} has shape {list(fused.shape)}, config.json asks for "
            f"{rows} rows"
        )
    for module, size, choose in parts:
        shape = (size, *fused.shape[1:])
        read = partial(_read, fused, choose, shape)
        reader.put(f"{module}.{kind}", CheckpointTensor(fused.file, fused.dtype, shape, read))


def _read(
    fused: CheckpointTensor,
    choose: Callable[[NDArray[Any]], NDArray[Any]],
    shape: tuple[int, ...],
) -> NDArray[Any]:
    return choose(fused.read()).reshape(shape)


def _layout(config: Fields, key: str, module: str, allowed: tuple[str, str]) -> str:
    layout = config.optional_string(key)
    if layout not in allowed:
        choice = " or ".join(describe(name) for name in allowed)
        problem = "is missing" if layout is None else f"{describe(layout)} is unknown"
        raise UnsupportedModelError(
            f"{config.where}: {key} {problem}: the checkpoint holds {module}, whose rows it must "
            f"describe; add it with the value {choice}"
        )
    return layout


def _qkv_parts(spec: ModelSpec, config: Fields, module: str) -> list[_Part]:
    attention = spec.attention
    if not isinstance(attention, GroupedQueryAttentionSpec):
        raise UnsupportedModelError(
            f"{config.where}: {module} does not belong to a model with latent attention"
        )
    layout = _layout(config, "qkv_layout", module, ("concatenated", "grouped"))
    groups, size = attention.num_kv_heads, attention.head_dim
    heads = attention.num_heads // groups  # query heads of a group
    prefix = module.removesuffix(_QKV)
    names = [f"{prefix}.{part}_proj" for part in "qkv"]
    q_rows, kv_rows = attention.num_heads * size, groups * size
    sizes = [q_rows, kv_rows, kv_rows]
    if layout == "concatenated":
        starts = [0, q_rows, q_rows + kv_rows]
        places = [slice(start, start + rows) for start, rows in zip(starts, sizes, strict=True)]
        chosen = [partial(_rows, place) for place in places]
        return list(zip(names, sizes, chosen, strict=True))
    within = [slice(heads), slice(heads, heads + 1), slice(heads + 1, heads + 2)]
    by_group = [partial(_rows_of_groups, groups, size, place) for place in within]
    return list(zip(names, sizes, by_group, strict=True))


def _gate_up_parts(config: Fields, module: str, rows: int) -> list[_Part]:
    layout = _layout(config, "gate_up_layout", module, ("concatenated", "interleaved"))
    prefix, half = module.removesuffix(_GATE_UP), rows // 2
    gate, up = slice(half), slice(half, 2 * half)
    if layout == "interleaved":
        gate, up = slice(0, None, 2), slice(1, None, 2)
    return [
        (f"{prefix}.gate_proj", half, partial(_rows, gate)),
        (f"{prefix}.up_proj", half, partial(_rows, up)),
    ]


def _rows(place: slice, fused: NDArray[Any]) -> NDArray[Any]:
    return fused[place]


def _rows_of_groups(groups: int, size: int, place: slice, fused: NDArray[Any]) -> NDArray[Any]:
    return fused.reshape(groups, -1, size, *fused.shape[1:])[:, place]
