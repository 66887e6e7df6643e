"""Attention of one layer: projections around the function that does the work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.checkpoint.names import layer_prefix
from deepseek_triton.checkpoint.spec import (
    LATENT_NORM_EPS,
    GroupedQueryAttentionSpec,
    LatentAttentionSpec,
    ModelSpec,
)
from deepseek_triton.export.graph import GraphBuilder
from deepseek_triton.export.modules import ModuleWriter, Projection


@dataclass(frozen=True)
class StepValues:
    """Values that are computed once a step and read by every layer."""

    cos: str  # [T, 1, R] float32
    sin: str  # [T, 1, R] float32
    turn: str  # [R, R]
    mask: str  # [B, S, 1, M·block_size + S] float32
    block_tables: str  # [B, M] int32


def pool_inputs(graph: GraphBuilder, spec: ModelSpec, layer: int, block_size: int) -> None:
    """Declare the KV pools of layer `layer` as graph inputs."""
    shape = ("num_blocks", block_size, spec.attention.pool_width)
    for pool in spec.attention.pools:
        graph.input(f"{pool}_pool.{layer}", graph.precision.onnx_type, shape)


def new_row_outputs(graph: GraphBuilder, spec: ModelSpec, layer: int) -> None:
    """Declare the new rows of layer `layer` as graph outputs."""
    shape = ("B", "S", spec.attention.pool_width)
    for pool in spec.attention.pools:
        graph.output(f"new_{pool}.{layer}", graph.precision.onnx_type, shape)


def attention(modules: ModuleWriter, x: str, layer: int, step: StepValues) -> str:
    """Append attention of layer `layer` over x [T, D]; return its output [T, D].

    Reads the layer's pools (`pool_inputs`) and makes its new rows (`new_row_outputs`).
    """
    spec = modules.spec.attention
    if isinstance(spec, LatentAttentionSpec):
        return _latent_attention(modules, spec, x, layer, step)
    return _grouped_query_attention(modules, spec, x, layer, step)


def _grouped_query_attention(
    modules: ModuleWriter,
    spec: GroupedQueryAttentionSpec,
    x: str,
    layer: int,
    step: StepValues,
) -> str:
    name, source = f"layers.{layer}.attention", layer_prefix(layer) + "self_attn."
    graph, hidden = modules.graph, modules.spec.hidden_size
    projections = [
        Projection(source + "q_proj", spec.num_heads * spec.head_dim, spec.qkv_bias),
        Projection(source + "k_proj", spec.pool_width, spec.qkv_bias),
        Projection(source + "v_proj", spec.pool_width, spec.qkv_bias),
    ]
    qkv = modules.linear(x, f"{name}.qkv", hidden, projections)
    sizes = graph.constant(
        f"{name}.qkv.sizes", np.array([p.outputs for p in projections], np.int64)
    )
    parts = tuple(f"{name}.split.{part}" for part in "qkv")
    parts = graph.node_with("Split", [qkv, sizes], f"{name}.split", parts, axis=-1)
    rotary = (step.cos, step.sin, step.turn)
    cache = (f"k_pool.{layer}", f"v_pool.{layer}", step.block_tables, step.mask)
    context, *_ = graph.node_with(
        "deepseek.GroupedQueryAttention",
        [*parts, *rotary, *cache],
        name,
        (f"{name}.context", f"new_k.{layer}", f"new_v.{layer}"),
        num_heads=[spec.num_heads],
        num_kv_heads=[spec.num_kv_heads],
        head_dim=[spec.head_dim],
        scale=spec.softmax_scale,
        rotary_interleaved=[int(modules.spec.rope.interleaved)],
    )
    out = Projection(source + "o_proj", hidden, spec.o_bias)
    return modules.linear(context, f"{name}.o", spec.num_heads * spec.head_dim, [out])


def _latent_attention(
    modules: ModuleWriter, spec: LatentAttentionSpec, x: str, layer: int, step: StepValues
) -> str:
    name, source = f"layers.{layer}.attention", layer_prefix(layer) + "self_attn."
    graph = modules.graph
    q, kv_a = _query_and_latent(modules, spec, x, name, source)
    kv_norm = modules.norm_weight(
        f"{name}.kv_norm.weight", source + "kv_a_layernorm", spec.kv_lora_rank
    )
    w_uk, w_uv = _latent_weights(modules, spec, name, source + "kv_b_proj.weight")
    rotary = (step.cos, step.sin, step.turn)
    cache = (f"kv_pool.{layer}", step.block_tables, step.mask)
    context, _ = graph.node_with(
        "deepseek.LatentAttention",
        [q, kv_a, kv_norm, w_uk, w_uv, *rotary, *cache],
        name,
        (f"{name}.context", f"new_kv.{layer}"),
        num_heads=[spec.num_heads],
        qk_head_dims=[spec.qk_nope_head_dim, spec.qk_rope_head_dim],
        latent_dims=[spec.kv_lora_rank, spec.qk_rope_head_dim],
        v_head_dim=[spec.v_head_dim],
        scale=spec.softmax_scale,
        epsilon=LATENT_NORM_EPS,
        rotary_interleaved=[int(modules.spec.rope.interleaved)],
    )
    out = Projection(source + "o_proj", modules.spec.hidden_size, spec.bias)
    width = spec.num_heads * spec.v_head_dim
    return modules.linear(context, f"{name}.o", width, [out])


def _query_and_latent(
    modules: ModuleWriter, spec: LatentAttentionSpec, x: str, name: str, source: str
) -> tuple[str, str]:
    """Append the projections of x [T, D]: q [T, H·(nope+rope)] and kv_a [T, W].

    All that read x share one product.
    """
    graph, hidden = modules.graph, modules.spec.hidden_size
    q_width = spec.num_heads * spec.qk_head_dim
    kv_a = Projection(source + "kv_a_proj_with_mqa", spec.latent_width, spec.bias)
    rank = spec.q_lora_rank
    if rank is None:
        first = Projection(source + "q_proj", q_width)
    else:
        first = Projection(source + "q_a_proj", rank, spec.bias)
    both = modules.linear(x, f"{name}.q_kv_a", hidden, [first, kv_a])
    sizes = graph.constant(
        f"{name}.q_kv_a.sizes", np.array([first.outputs, kv_a.outputs], np.int64)
    )
    q, latent = graph.node_with(
        "Split", [both, sizes], f"{name}.split", (f"{name}.split.q", f"{name}.split.kv_a"), axis=-1
    )
    if rank is not None:
        q = modules.rms_norm(q, f"{name}.q_norm", source + "q_a_layernorm", rank, LATENT_NORM_EPS)
        q = modules.linear(q, f"{name}.q_b", rank, [Projection(source + "q_b_proj", q_width)])
    return q, latent


def _latent_weights(
    modules: ModuleWriter, spec: LatentAttentionSpec, name: str, source: str
) -> tuple[str, str]:
    """Add w_uk [H, nope, rank] and w_uv [H, rank, v], the two halves of kv_b_proj.

    The checkpoint holds [H, nope + v, rank]; w_uv is transposed head by head, so that no target has
    to transpose it in the graph.
    """
    heads, nope, value, rank = (
        spec.num_heads,
        spec.qk_nope_head_dim,
        spec.v_head_dim,
        spec.kv_lora_rank,
    )

    def by_head() -> NDArray[Any]:
        kv_b = modules.reader.require(source, (heads * (nope + value), rank))
        return kv_b.reshape(heads, nope + value, rank)

    def keys() -> Iterator[NDArray[Any]]:
        for head in by_head():
            yield head[:nope]

    def values_transposed() -> Iterator[NDArray[Any]]:
        for head in by_head():
            yield head[nope:].T

    graph = modules.graph
    w_uk = graph.weight(f"{name}.w_uk", (heads, nope, rank), graph.stored(source, keys()))
    values = graph.stored(source, values_transposed())
    w_uv = graph.weight(f"{name}.w_uv", (heads, rank, value), values)
    return w_uk, w_uv
