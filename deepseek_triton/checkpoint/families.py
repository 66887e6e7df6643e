"""The model families: how their config.json names them, and what it leaves out.

A key that is absent takes the default of the family's configuration class in transformers; of the
first DeepSeek-MoE, which is not in transformers, the default of the code beside its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepseek_triton.checkpoint.fields import describe
from deepseek_triton.checkpoint.spec import Architecture
from deepseek_triton.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True)
class ExpertDefaults:
    """Defaults of a family with experts; None: the key must be there."""

    moe_intermediate_size: int | None
    n_shared_experts: int
    n_routed_experts: int | None
    num_experts_per_tok: int | None
    first_k_dense_replace: int
    routed_scaling_factor: float


@dataclass(frozen=True)
class Family:
    """One architecture: its name in config.json, its defaults, the values that it must have."""

    class_name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_id: int | None
    num_key_value_heads: int | None = None  # None: as many as attention heads
    experts: ExpertDefaults | None = None
    # Keys whose value must be one of these, if it is there and not null.
    allowed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    rope_types: tuple[str, ...] = ("default", "yarn")


_MOE_KEYS: dict[str, tuple[object, ...]] = {
    "moe_layer_freq": (1,),
    "partial_rotary_factor": (1.0,),
}
_GROUPED_QUERY_ROPE = ("default", "linear", "llama3", "yarn")

FAMILIES: dict[Architecture, Family] = {
    "deepseek": Family(
        class_name="DeepseekForCausalLM",
        vocab_size=102400,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=30,
        num_attention_heads=32,
        max_position_embeddings=2048,
        bos_token_id=100000,
        eos_token_id=100001,
        experts=ExpertDefaults(
            moe_intermediate_size=None,
            n_shared_experts=0,
            n_routed_experts=None,
            num_experts_per_tok=None,
            first_k_dense_replace=0,
            routed_scaling_factor=1.0,
        ),
        allowed={
            **_MOE_KEYS,
            "scoring_func": ("softmax",),
            "topk_method": ("greedy",),
            "norm_topk_prob": (False,),
            "routed_scaling_factor": (1.0,),
        },
        rope_types=("default", "linear"),
    ),
    "deepseek_v2": Family(
        class_name="DeepseekV2ForCausalLM",
        vocab_size=102400,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        experts=ExpertDefaults(
            moe_intermediate_size=1407,
            n_shared_experts=2,
            n_routed_experts=64,
            num_experts_per_tok=None,
            first_k_dense_replace=0,
            routed_scaling_factor=1.0,
        ),
        allowed={
            **_MOE_KEYS,
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
        },
    ),
    "deepseek_v3": Family(
        class_name="DeepseekV3ForCausalLM",
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        num_hidden_layers=61,
        num_attention_heads=128,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        experts=ExpertDefaults(
            moe_intermediate_size=2048,
            n_shared_experts=1,
            n_routed_experts=256,
            num_experts_per_tok=8,
            first_k_dense_replace=3,
            routed_scaling_factor=2.5,
        ),
        allowed={**_MOE_KEYS, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    ),
    "llama": Family(
        class_name="LlamaForCausalLM",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        allowed={"partial_rotary_factor": (1.0,)},
        rope_types=_GROUPED_QUERY_ROPE,
    ),
    "qwen2": Family(
        class_name="Qwen2ForCausalLM",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=22016,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=32768,
        bos_token_id=None,
        eos_token_id=None,
        num_key_value_heads=32,
        allowed={
            "partial_rotary_factor": (1.0,),
            "use_sliding_window": (False,),
            "use_mrope": (False,),
        },
        rope_types=_GROUPED_QUERY_ROPE,
    ),
}

# What a known model would need, for the message that refuses it.
MISSING_FEATURES = {
    "deepseek_v32": "sparse attention with its lightning indexer is not implemented yet",
    "deepseek_v4": "its hybrid sparse attention and hyper-connections are not implemented yet",
    "deepseek_vl_v2": "its vision tower is not implemented",
    "qwen3": "norms of each head's queries and keys are not implemented",
}
SUPPORTED = "supported are " + ", ".join(
    f"{model_type} ({family.class_name})" for model_type, family in FAMILIES.items()
)


def find_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """Return the architecture of a parsed config.json; `where` names it in messages.

    Raises CheckpointError if it names none, UnsupportedModelError if it names another one.
    """
    model_type = config.get("model_type")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{where}: architectures must be a list of names")
    if model_type is None and names:
        model_type = next(
            (known for known, family in FAMILIES.items() if family.class_name == names[0]), names[0]
        )
    if model_type is None:
        raise CheckpointError(f"{where}: model_type is missing; {SUPPORTED}")
    if model_type == "deepseek" and config.get("kv_lora_rank") is not None:
        raise UnsupportedModelError(
            f'{where}: model_type "deepseek" with kv_lora_rank is the first upload of DeepSeek-V2; '
            'set model_type to "deepseek_v2" and architectures to ["DeepseekV2ForCausalLM"]'
        )
    for known, family in FAMILIES.items():
        if model_type == known and (not names or family.class_name in names):
            return known
    found = describe(model_type) + (f" with architectures {describe(names)}" if names else "")
    reason = MISSING_FEATURES.get(model_type, "") if isinstance(model_type, str) else ""
    raise UnsupportedModelError(
        f"{where}: model_type {found} is not supported{': ' if reason else ''}{reason}; {SUPPORTED}"
    )
