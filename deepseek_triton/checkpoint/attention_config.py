"""Attention and rotary embedding, from config.json."""

from __future__ import annotations

import math

from deepseek_triton.checkpoint.families import Family
from deepseek_triton.checkpoint.fields import Fields, describe
from deepseek_triton.checkpoint.spec import (
    Architecture,
    GroupedQueryAttentionSpec,
    LatentAttentionSpec,
    LinearSpec,
    Llama3Spec,
    RopeScaling,
    RopeSpec,
    YarnSpec,
)
from deepseek_triton.errors import UnsupportedModelError


def read_rope(
    fields: Fields, architecture: Architecture, family: Family, max_positions: int
) -> RopeSpec:
    """Return the rotary embedding; raise UnsupportedModelError for a type that is not there."""
    # Files written before transformers 5 say rope_scaling and keep rope_theta beside it.
    key = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
    values = fields.object(key)
    rope = Fields(values, f"{fields.where}: {key}")
    if any(isinstance(value, dict) for value in values.values()):
        raise UnsupportedModelError(f"{rope.where}: one rope per layer type is not supported")
    rope_type = rope.optional_string("rope_type") or rope.optional_string("type") or "default"
    if rope_type not in family.rope_types:
        raise UnsupportedModelError(
            f"{rope.where}: rope type {describe(rope_type)} is not supported for {architecture}; "
            f"supported are {', '.join(map(describe, family.rope_types))}"
        )
    if rope.optional_number("partial_rotary_factor") not in (None, 1.0):
        raise UnsupportedModelError(f"{rope.where}: partial_rotary_factor must be 1")
    theta_source = rope if rope.has("rope_theta") else fields
    return RopeSpec(
        dim=_rotated_dim(fields, architecture, family),
        theta=theta_source.positive("rope_theta", 10000.0),
        interleaved=architecture == "deepseek_v2"
        or (architecture == "deepseek_v3" and fields.boolean("rope_interleave", True)),
        scaling=_scaling(rope_type, rope, fields, max_positions),
    )


def _rotated_dim(fields: Fields, architecture: Architecture, family: Family) -> int:
    latent = architecture in ("deepseek_v2", "deepseek_v3")
    key = "qk_rope_head_dim" if latent else "head_dim"
    if latent or fields.has(key):
        dim = fields.integer(key, 64)
    else:
        hidden = fields.integer("hidden_size", family.hidden_size)
        heads = fields.integer("num_attention_heads", family.num_attention_heads)
        if hidden % heads:
            raise fields.error(
                key,
                f"is missing, and num_attention_heads {heads} does not divide hidden_size {hidden}",
            )
        dim = hidden // heads
    if dim % 2:
        raise fields.error(key, f"must be even, found {dim}: rotary embedding turns pairs")
    return dim


def _scaling(
    rope_type: str, rope: Fields, fields: Fields, max_positions: int
) -> RopeScaling | None:
    if rope_type == "default":
        return None
    if rope_type == "yarn":
        return _yarn(rope, fields, max_positions)
    needed = ["factor"]
    if rope_type == "llama3":
        needed += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    for key in needed:
        if not rope.has(key):
            raise rope.error(key, f"is missing: rope type {describe(rope_type)} needs it")
    factor = rope.positive("factor", 1.0)
    if rope_type == "linear":
        return LinearSpec(factor)
    scaling = Llama3Spec(
        factor,
        rope.positive("low_freq_factor", 1.0),
        rope.positive("high_freq_factor", 4.0),
        rope.integer("original_max_position_embeddings", 8192),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.error(
            "high_freq_factor",
            f"{scaling.high_freq_factor} must be above low_freq_factor {scaling.low_freq_factor}",
        )
    return scaling


def _yarn(rope: Fields, fields: Fields, max_positions: int) -> YarnSpec:
    if rope.has("attention_factor"):
        raise UnsupportedModelError(
            f"{rope.where}: attention_factor is not supported; DeepSeek's configs state mscale"
        )
    # transformers lets a top-level key win, and falls back on the extended length.
    source = fields if fields.has("original_max_position_embeddings") else rope
    original = source.integer("original_max_position_embeddings", max_positions)
    if "factor" not in rope.values:
        raise rope.error("factor", "is missing: yarn needs it")
    factor = rope.positive("factor", 1.0) if rope.has("factor") else max_positions / original
    return YarnSpec(
        factor=factor,
        original_max_position_embeddings=original,
        # In these four an explicit 0 means "not set" to transformers.
        beta_fast=rope.optional_number("beta_fast") or 32.0,
        beta_slow=rope.optional_number("beta_slow") or 1.0,
        mscale=rope.optional_number("mscale") or None,
        mscale_all_dim=rope.optional_number("mscale_all_dim") or None,
        truncate=rope.boolean("truncate", True),
    )


def read_attention(
    fields: Fields, architecture: Architecture, family: Family, rope: RopeSpec
) -> LatentAttentionSpec | GroupedQueryAttentionSpec:
    """Return the attention of every layer."""
    num_heads = fields.integer("num_attention_heads", family.num_attention_heads)
    if architecture in ("deepseek_v2", "deepseek_v3"):
        return _latent(fields, num_heads, rope)
    num_kv_heads = fields.optional_integer("num_key_value_heads", family.num_key_value_heads)
    if num_kv_heads is None:
        num_kv_heads = num_heads
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", f"{num_kv_heads} does not divide the {num_heads} attention heads"
        )
    if architecture == "qwen2":
        _refuse_sliding_layers(fields)
    bias = architecture != "qwen2" and fields.boolean("attention_bias", False)
    return GroupedQueryAttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=rope.dim,
        softmax_scale=rope.dim**-0.5,
        qkv_bias=bias or architecture == "qwen2",
        o_bias=bias,
    )


def _refuse_sliding_layers(fields: Fields) -> None:
    kinds = fields.values.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UnsupportedModelError(
            f"{fields.where}: layer_types {describe(kinds)} is not supported; "
            'every layer must have "full_attention"'
        )


def _latent(fields: Fields, num_heads: int, rope: RopeSpec) -> LatentAttentionSpec:
    kv_heads = fields.optional_integer("num_key_value_heads", None)
    if kv_heads not in (None, num_heads):
        raise fields.error(
            "num_key_value_heads",
            f"must equal num_attention_heads ({num_heads}) with latent attention, found {kv_heads}",
        )
    nope = fields.integer("qk_nope_head_dim", 128)
    return LatentAttentionSpec(
        num_heads=num_heads,
        q_lora_rank=fields.optional_integer("q_lora_rank", 1536),
        kv_lora_rank=fields.integer("kv_lora_rank", 512),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope.dim,
        v_head_dim=fields.integer("v_head_dim", 128),
        softmax_scale=_softmax_scale(nope + rope.dim, rope.yarn),
        bias=fields.boolean("attention_bias", False),
    )


def _softmax_scale(qk_head_dim: int, yarn: YarnSpec | None) -> float:
    """1/√d, times mscale(factor, mscale_all_dim)² where yarn sets it (arXiv 2309.00071, eq. 22)."""
    scale: float = qk_head_dim**-0.5
    if yarn is None or yarn.mscale_all_dim is None or yarn.factor <= 1.0:
        return scale
    mscale = 0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1.0
    return scale * mscale * mscale
