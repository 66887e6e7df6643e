"""Which linear layers read one activation, and which weights before it can take its scale.

Multiplying the columns of every reader by s and dividing what makes the activation by s leaves the
layer's function as it is, where everything between is linear in each channel:

    norm weight ──▶ its readers             (the router reads it too, in floating point)
    q_a norm ─────▶ q_b
    up ───────────▶ down                    (silu(gate) · up is linear in up)
    value rows of kv_b, v ──▶ o             (attention averages values)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.checkpoint.names import layer_prefix
from deepseek_triton.checkpoint.spec import (
    GroupedQueryAttentionSpec,
    LatentAttentionSpec,
    ModelSpec,
)


@dataclass(frozen=True)
class ScaleGroup:
    """Readers of one activation [T, K], and its maker."""

    value: str  # the activation's name in the graph of the layer; "" for an expert's own
    linears: tuple[str, ...]  # module names; to be quantised
    maker: str  # name of the tensor whose rows take 1/s
    rows: NDArray[np.intp]  # [K] the maker's row for each channel
    others: tuple[str, ...] = ()  # further readers: the router and the routed experts


class Expert(NamedTuple):
    """A routed expert, which sees the tokens that reach it."""

    gate: str
    up: str
    down: ScaleGroup

    @property
    def linears(self) -> tuple[str, str, str]:
        """Its modules' names."""
        return self.gate, self.up, self.down.linears[0]


def scale_groups(spec: ModelSpec, layer: int) -> Iterator[ScaleGroup]:
    """Yield the groups of a layer, but for what lies within its routed experts."""
    prefix, name = layer_prefix(layer), f"layers.{layer}"
    yield from _attention(spec, prefix, name)
    norm, mlp = prefix + "post_attention_layernorm.weight", prefix + "mlp."
    size, inside = spec.intermediate_size, f"{name}.mlp"
    others: list[str] = []
    if spec.moe is not None and layer in spec.moe_layers:
        size, inside = spec.moe.shared_intermediate_size, f"{name}.mlp.shared"
        others.append(mlp + "gate")
        for expert in experts(spec, layer):
            others += (expert.gate, expert.up)
        mlp += "shared_experts."
    linears = (mlp + "gate_proj", mlp + "up_proj") if size else ()
    hidden = np.arange(spec.hidden_size)
    yield ScaleGroup(f"{name}.mlp_norm", linears, norm, hidden, tuple(others))
    if size:
        yield _down(mlp, f"{inside}.swiglu", size)


def experts(spec: ModelSpec, layer: int) -> tuple[Expert, ...]:
    """Return the routed experts of a layer; none for a dense layer."""
    if spec.moe is None or layer not in spec.moe_layers:
        return ()
    prefixes = (
        f"{layer_prefix(layer)}mlp.experts.{expert}."
        for expert in range(spec.moe.routing.num_experts)
    )
    size = spec.moe.expert_intermediate_size
    return tuple(Expert(p + "gate_proj", p + "up_proj", _down(p, "", size)) for p in prefixes)


def linear_modules(spec: ModelSpec, layer: int) -> Iterator[str]:
    """Yield the names of all linear layers of a layer that are to be quantised."""
    for group in scale_groups(spec, layer):
        yield from group.linears
    for expert in experts(spec, layer):
        yield from expert.linears


def _down(prefix: str, value: str, size: int) -> ScaleGroup:
    return ScaleGroup(value, (prefix + "down_proj",), prefix + "up_proj.weight", np.arange(size))


def _attention(spec: ModelSpec, prefix: str, name: str) -> Iterator[ScaleGroup]:
    attention, source = spec.attention, prefix + "self_attn."
    norm, hidden = prefix + "input_layernorm.weight", np.arange(spec.hidden_size)
    value, context = f"{name}.attention_norm", f"{name}.attention.context"
    out = (source + "o_proj",)
    if isinstance(attention, GroupedQueryAttentionSpec):
        linears = tuple(source + kind for kind in ("q_proj", "k_proj", "v_proj"))
        yield ScaleGroup(value, linears, norm, hidden)
        yield ScaleGroup(context, out, source + "v_proj.weight", _shared_rows(attention))
        return
    rank = attention.q_lora_rank
    first = "q_proj" if rank is None else "q_a_proj"
    yield ScaleGroup(value, (source + first, source + "kv_a_proj_with_mqa"), norm, hidden)
    if rank is not None:
        q_norm = source + "q_a_layernorm.weight"
        yield ScaleGroup(
            f"{name}.attention.q_norm", (source + "q_b_proj",), q_norm, np.arange(rank)
        )
    yield ScaleGroup(context, out, source + "kv_b_proj.weight", _value_rows(attention))


def _value_rows(attention: LatentAttentionSpec) -> NDArray[np.intp]:
    """Rows of kv_b that make each channel of the context: keys, then values, head by head."""
    nope, value = attention.qk_nope_head_dim, attention.v_head_dim
    heads = np.arange(attention.num_heads)[:, None] * (nope + value)
    return (heads + nope + np.arange(value)).reshape(-1)


def _shared_rows(attention: GroupedQueryAttentionSpec) -> NDArray[np.intp]:
    """Rows of v that make each channel of the context: heads of a group share them."""
    group = np.arange(attention.num_heads) // (attention.num_heads // attention.num_kv_heads)
    rows = group[:, None] * attention.head_dim + np.arange(attention.head_dim)
    return rows.reshape(-1)


@dataclass
class Folding:
    """The scales of a layer, and what they do to each of its tensors."""

    _columns: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    _rows: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def add(self, group: ScaleGroup, scale: NDArray[np.float32], maker_rows: int) -> None:
        """Scale the channels of `group` by `scale` [K]; its maker has `maker_rows` rows."""
        for module in (*group.linears, *group.others):
            self._columns[module + ".weight"] = scale
        by_row = np.ones(maker_rows, np.float32)
        by_row[group.rows] = scale
        for name in (group.maker, group.maker.removesuffix("weight") + "bias"):
            self._rows[name] = by_row

    def changes(self, name: str) -> bool:
        """Whether the tensor `name` is not what it was."""
        return name in self._columns or name in self._rows

    def scale_of(self, module: str) -> NDArray[np.float32]:
        """Return the scale [K] of a linear layer's input channels, or [1] if it has none."""
        return self._columns.get(module + ".weight", np.ones(1, np.float32))

    def apply(self, name: str, array: NDArray[Any]) -> NDArray[np.float32]:
        """Return the tensor `name` [N, …] with its scales, as float32; a new array."""
        result = np.array(array, np.float32)
        if name in self._columns:
            result *= self._columns[name]
        if name in self._rows:
            by_row = self._rows[name]
            result /= by_row.reshape(-1, *[1] * (result.ndim - 1))
        return result
