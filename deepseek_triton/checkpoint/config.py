"""A checkpoint's config.json as a ModelSpec.

Keys that are absent take the defaults of transformers' DeepseekV2Config and DeepseekV3Config: a
checkpoint means here what it means there. Whatever would change the numbers and is not implemented
is refused by name, never ignored.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_triton.checkpoint.fields import Fields, describe, read_json_object
from deepseek_triton.checkpoint.spec import (
    Architecture,
    LatentAttentionSpec,
    ModelSpec,
    MoESpec,
    RopeSpec,
    RoutingSpec,
    YarnSpec,
)
from deepseek_triton.errors import CheckpointError, UnsupportedModelError

logger = logging.getLogger(__name__)

MAX_LAYERS = 4096
MAX_EXPERTS = 65536
WEIGHT_DTYPES = ("float32", "float16", "bfloat16")

ARCHITECTURES: dict[str, Architecture] = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
SUPPORTED = "supported are " + " and ".join(
    f"{model_type} ({name})" for name, model_type in ARCHITECTURES.items()
)

# What a known model would need, for the message that refuses it.
MISSING_FEATURES = {
    "deepseek_v32": "sparse attention with its lightning indexer is not implemented yet",
    "deepseek_v4": "its hybrid sparse attention and hyper-connections are not implemented yet",
    "deepseek": "the first DeepSeek-MoE with multi-head attention is not implemented",
    "llama": "grouped-query attention is not implemented yet",
    "qwen2": "grouped-query attention with biases is not implemented yet",
}


@dataclass(frozen=True)
class _Defaults:
    """Where the two configuration classes of transformers differ."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_shared_experts: int
    n_routed_experts: int
    num_experts_per_tok: int | None
    first_k_dense_replace: int
    routed_scaling_factor: float
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int


_DEFAULTS: dict[Architecture, _Defaults] = {
    "deepseek_v2": _Defaults(
        vocab_size=102400,
        hidden_size=4096,
        intermediate_size=11008,
        moe_intermediate_size=1407,
        num_hidden_layers=32,
        num_attention_heads=32,
        n_shared_experts=2,
        n_routed_experts=64,
        num_experts_per_tok=None,
        first_k_dense_replace=0,
        routed_scaling_factor=1.0,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "deepseek_v3": _Defaults(
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_attention_heads=128,
        n_shared_experts=1,
        n_routed_experts=256,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
    ),
}


def read_model_spec(checkpoint_dir: Path | str) -> ModelSpec:
    """Read config.json, and generation_config.json for the end ids, of a checkpoint folder.

    Raises CheckpointError for a missing file or a bad value (naming file and key) and
    UnsupportedModelError for a model or feature that is not implemented.
    """
    path = find_config(checkpoint_dir)
    generation_path = path.with_name("generation_config.json")
    generation = read_json_object(generation_path) if generation_path.is_file() else {}
    return model_spec_from_config(read_json_object(path), generation, where=str(path))


def find_config(checkpoint_dir: Path | str) -> Path:
    """Return the path of config.json; raise CheckpointError if folder or file do not exist."""
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint {folder}: the folder does not exist")
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path}: not found; a checkpoint is a folder in Hugging Face form, with config.json, "
            "safetensors files and tokenizer.json"
        )
    return path


def model_spec_from_config(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    *,
    where: str = "config.json",
) -> ModelSpec:
    """Return the ModelSpec of a config that is already parsed; `where` names it in messages."""
    architecture = _architecture(config, where)
    fields = Fields(config, where)
    defaults = _DEFAULTS[architecture]
    _refuse_unsupported(fields, architecture)
    _warn_of_ignored_dtype(fields)
    vocab_size = fields.integer("vocab_size", defaults.vocab_size)
    num_layers = fields.integer("num_hidden_layers", defaults.num_hidden_layers, maximum=MAX_LAYERS)
    first_moe = fields.integer("first_k_dense_replace", defaults.first_k_dense_replace, minimum=0)
    max_positions = fields.integer("max_position_embeddings", defaults.max_position_embeddings)
    rope = _rope(fields, architecture, max_positions)
    bos, eos = _special_ids(fields, generation_config or {}, defaults, vocab_size)
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size", defaults.hidden_size),
        num_layers=num_layers,
        intermediate_size=fields.integer("intermediate_size", defaults.intermediate_size),
        moe_layers=tuple(range(first_moe, num_layers)),
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention=_attention(fields, defaults, rope),
        rope=rope,
        moe=_moe(fields, architecture, defaults) if first_moe < num_layers else None,
        bos_token_id=bos,
        eos_token_ids=eos,
    )


def _architecture(config: Mapping[str, Any], where: str) -> Architecture:
    model_type = config.get("model_type")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{where}: architectures must be a list of names")
    if model_type is None and names:
        model_type = ARCHITECTURES.get(names[0], names[0])
    if model_type is None:
        raise CheckpointError(f"{where}: model_type is missing; {SUPPORTED}")
    for name, supported in ARCHITECTURES.items():
        if model_type == supported and (not names or name in names):
            return supported
    found = describe(model_type) + (f" with architectures {describe(names)}" if names else "")
    reason = MISSING_FEATURES.get(model_type, "") if isinstance(model_type, str) else ""
    raise UnsupportedModelError(
        f"{where}: model_type {found} is not supported{': ' if reason else ''}{reason}; {SUPPORTED}"
    )


def _refuse_unsupported(fields: Fields, architecture: Architecture) -> None:
    """Refuse keys whose value asks for something that the reference or this package lacks."""
    v3 = architecture == "deepseek_v3"
    allowed: dict[str, tuple[object, ...]] = {
        "hidden_act": ("silu",),
        "moe_layer_freq": (1,),
        "mlp_bias": (False,),
        "partial_rotary_factor": (1.0,),
        "scoring_func": ("sigmoid",) if v3 else ("softmax",),
        "topk_method": ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy"),
    }
    for key, values in allowed.items():
        value = fields.values.get(key)
        if value is not None and value not in values:
            expected = " or ".join(describe(v) for v in values)
            raise UnsupportedModelError(
                f"{fields.where}: {key} {describe(value)} is not supported for {architecture}; "
                f"it must be {expected}"
            )
    for key in ("quantization_config", "compression_config"):
        if fields.has(key):
            method = fields.object(key).get("quant_method", "of an unnamed kind")
            raise UnsupportedModelError(
                f"{fields.where}: {key} ({method}): quantised checkpoints are not supported yet; "
                "convert the weights to bfloat16 or use an unquantised checkpoint"
            )


def _special_ids(
    fields: Fields, generation_config: Mapping[str, Any], defaults: _Defaults, vocab_size: int
) -> tuple[int | None, tuple[int, ...]]:
    """Return (bos, end ids); generation_config.json wins, as when transformers generates."""
    generation = Fields(
        generation_config, str(Path(fields.where).parent / "generation_config.json")
    )
    found = {}
    for key, default in (
        ("eos_token_id", defaults.eos_token_id),
        ("bos_token_id", defaults.bos_token_id),
    ):
        if not generation.has(key):
            found[key] = _ids_in_vocabulary(fields, key, default, vocab_size)
            continue
        found[key] = _ids_in_vocabulary(generation, key, None, vocab_size)
        try:
            _ids_in_vocabulary(fields, key, None, vocab_size)
        except CheckpointError as error:
            logger.warning("%s; ignored, %s decides", error, generation.where)
    bos = found["bos_token_id"]
    return (bos[0] if bos else None), found["eos_token_id"]


def _ids_in_vocabulary(
    source: Fields, key: str, default: int | None, vocab_size: int
) -> tuple[int, ...]:
    ids = source.token_ids(key, default)
    if ids and max(ids) >= vocab_size:
        raise source.error(key, f"{max(ids)} is outside the vocabulary of {vocab_size} tokens")
    return ids


def _warn_of_ignored_dtype(fields: Fields) -> None:
    for key in ("torch_dtype", "dtype"):  # transformers 5 writes the second
        if fields.has(key) and fields.values[key] not in WEIGHT_DTYPES:
            logger.warning(
                "%s: %s %s is ignored: weights are read in the dtype that they are stored in",
                fields.where, key, describe(fields.values[key]),
            )  # fmt: skip


def _rope(fields: Fields, architecture: Architecture, max_positions: int) -> RopeSpec:
    # Files written before transformers 5 say rope_scaling and keep rope_theta beside it.
    key = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
    values = fields.object(key)
    rope = Fields(values, f"{fields.where}: {key}")
    if any(isinstance(value, dict) for value in values.values()):
        raise UnsupportedModelError(f"{rope.where}: one rope per layer type is not supported")
    rope_type = rope.optional_string("rope_type") or rope.optional_string("type") or "default"
    if rope_type not in ("default", "yarn"):
        raise UnsupportedModelError(
            f"{rope.where}: rope type {describe(rope_type)} is not supported; "
            'supported are "default" and "yarn"'
        )
    if rope.optional_number("partial_rotary_factor") not in (None, 1.0):
        raise UnsupportedModelError(f"{rope.where}: partial_rotary_factor must be 1")
    dim = fields.integer("qk_rope_head_dim", 64)
    if dim % 2:
        raise fields.error("qk_rope_head_dim", f"must be even, found {dim}")
    theta_source = rope if rope.has("rope_theta") else fields
    return RopeSpec(
        dim=dim,
        theta=theta_source.positive("rope_theta", 10000.0),
        interleaved=architecture == "deepseek_v2" or fields.boolean("rope_interleave", True),
        scaling=_yarn(rope, fields, max_positions) if rope_type == "yarn" else None,
    )


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


def _attention(fields: Fields, defaults: _Defaults, rope: RopeSpec) -> LatentAttentionSpec:
    num_heads = fields.integer("num_attention_heads", defaults.num_attention_heads)
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


def _moe(fields: Fields, architecture: Architecture, defaults: _Defaults) -> MoESpec:
    expert_size = fields.integer("moe_intermediate_size", defaults.moe_intermediate_size)
    shared = fields.optional_integer("n_shared_experts", defaults.n_shared_experts, minimum=0) or 0
    return MoESpec(
        routing=_routing(fields, architecture, defaults),
        expert_intermediate_size=expert_size,
        shared_intermediate_size=shared * expert_size,
    )


def _routing(fields: Fields, architecture: Architecture, defaults: _Defaults) -> RoutingSpec:
    num_experts = fields.integer("n_routed_experts", defaults.n_routed_experts, maximum=MAX_EXPERTS)
    if fields.has("num_experts_per_tok") or defaults.num_experts_per_tok is None:
        top_k = fields.required_integer("num_experts_per_tok", "the experts that a token takes")
    else:
        top_k = defaults.num_experts_per_tok
    v3 = architecture == "deepseek_v3"
    num_groups = top_groups = 1
    if v3:
        num_groups = fields.integer("n_group", 8)
        top_groups = fields.integer("topk_group", 4)
    elif fields.optional_string("topk_method") == "group_limited_greedy":
        num_groups = fields.required_integer("n_group", "group_limited_greedy needs it")
        top_groups = fields.required_integer("topk_group", "group_limited_greedy needs it")
    _check_groups(fields, num_experts, top_k, num_groups, top_groups)
    if v3 and num_experts // num_groups < 2:
        raise fields.error("n_group", "must leave two experts a group: their scores are summed")
    return RoutingSpec(
        kind="sigmoid" if v3 else "softmax",
        num_experts=num_experts,
        top_k=top_k,
        num_groups=num_groups,
        top_groups=top_groups,
        scaling_factor=fields.positive("routed_scaling_factor", defaults.routed_scaling_factor),
        normalize=v3 and fields.boolean("norm_topk_prob", True),
    )


def _check_groups(
    fields: Fields, num_experts: int, top_k: int, num_groups: int, top_groups: int
) -> None:
    if num_experts % num_groups:
        raise fields.error("n_group", f"{num_groups} does not divide {num_experts} experts")
    if top_groups > num_groups:
        raise fields.error("topk_group", f"{top_groups} is more than n_group {num_groups}")
    choice = top_groups * (num_experts // num_groups)
    if top_k > choice:
        raise fields.error(
            "num_experts_per_tok", f"{top_k} is more than the {choice} experts to choose from"
        )
