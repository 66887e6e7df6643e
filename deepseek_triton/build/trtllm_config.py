"""config.json of a TensorRT-LLM 1.2 checkpoint.

Keys and values follow its public source: models/modeling_utils.py (PretrainedConfig), models/
deepseek_v2/config.py, models/llama/config.py, models/qwen/config.py, layers/moe.py, mapping.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from deepseek_triton.build.parallel import Parallel
from deepseek_triton.checkpoint.spec import (
    GroupedQueryAttentionSpec,
    LatentAttentionSpec,
    LinearSpec,
    Llama3Spec,
    ModelSpec,
    MoESpec,
)
from deepseek_triton.errors import ConfigError

DTYPES = {"fp16": "float16", "bf16": "bfloat16"}

# layers/moe.py: MoeConfig.ExpertScaleNormalizationMode and MoeConfig.TopKMethod
_NORMALIZATION_NONE, _DEVICE_LIMITED = 0, 3
_GREEDY, _GROUP_LIMITED_GREEDY, _NOAUX_TC = 0, 1, 2


def check_supported(spec: ModelSpec) -> None:
    """Raise ConfigError for a model that TensorRT-LLM 1.2's engines cannot run."""
    if spec.architecture not in _ARCHITECTURES:
        raise ConfigError(f"TARGET: tensorrt_llm is not written for {spec.architecture} models")
    if not isinstance(spec.attention, LatentAttentionSpec):
        return
    problem = None
    if spec.moe is None:
        problem = "its DeepSeek class needs experts"
    elif spec.moe_layers != tuple(range(1, spec.num_layers)):
        problem = "its DeepSeek class has experts in every layer but the first"
    elif spec.rope.yarn is None:
        problem = "its DeepSeek class needs YaRN rope scaling"
    elif spec.attention.bias:
        problem = "its DeepSeek class has no attention bias"
    elif spec.moe.routing.kind == "softmax" and spec.moe.routing.num_groups == 1:
        if spec.moe.routing.scaling_factor != 1.0:
            problem = "its greedy routing has no scaling factor"
    if problem is not None:
        raise ConfigError(
            f"TARGET: TensorRT-LLM 1.2 has no engine for this model: {problem}; use its LLM API "
            "(model.yaml, TensorRT-LLM 1.3 and later) or another target"
        )


def checkpoint_config(
    spec: ModelSpec, precision: str, parallel: Parallel, int4_group_size: int | None
) -> dict[str, Any]:
    """Return config.json of the whole checkpoint; `rank` is filled in by the builder of each.

    `int4_group_size` None means that no weight is INT4.
    """
    common = {
        "architecture": _ARCHITECTURES[spec.architecture],
        "dtype": DTYPES[precision],
        "logits_dtype": "float32",
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.attention.num_heads,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": spec.max_position_embeddings,
        "norm_epsilon": spec.rms_norm_eps,
        "rotary_base": spec.rope.theta,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "mapping": {
            "world_size": parallel.world_size,
            "tp_size": parallel.tp,
            "pp_size": parallel.pp,
            "moe_tp_size": parallel.tp // parallel.ep,
            "moe_ep_size": parallel.ep,
        },
        "quantization": _quantization(int4_group_size),
    }
    if isinstance(spec.attention, LatentAttentionSpec):
        return common | _deepseek(spec, spec.attention)
    return common | _grouped_query(spec, spec.attention)


_ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}


def _quantization(group_size: int | None) -> dict[str, Any]:
    if group_size is None:
        return {"quant_algo": None, "kv_cache_quant_algo": None}
    # AWQ's scales are folded into the weights, so no scale is applied to the inputs.
    return {
        "quant_algo": "W4A16_AWQ",
        "kv_cache_quant_algo": None,
        "group_size": group_size,
        "has_zero_point": False,
        "pre_quant_scale": False,
        "exclude_modules": ["lm_head"],
    }


def _deepseek(spec: ModelSpec, attention: LatentAttentionSpec) -> dict[str, Any]:
    if spec.moe is None:
        raise ConfigError("TARGET: TensorRT-LLM 1.2's DeepSeek class needs experts")
    moe_layers, yarn = spec.moe_layers, spec.rope.yarn
    scaling = None
    if yarn is not None:
        scaling = {
            "type": "yarn",
            "factor": yarn.factor,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": 1.0 if yarn.mscale is None else yarn.mscale,
            "mscale_all_dim": 0.0 if yarn.mscale_all_dim is None else yarn.mscale_all_dim,
            "original_max_position_embeddings": yarn.original_max_position_embeddings,
        }
    return {
        "num_key_value_heads": 1,
        "head_size": attention.latent_width,
        "hidden_act": "swiglu",
        "rotary_scaling": scaling,
        "q_lora_rank": attention.q_lora_rank,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "moe_inter_size": spec.moe.expert_intermediate_size,
        "first_k_dense_replace": moe_layers[0] if moe_layers else spec.num_layers,
        "moe_layer_freq": 1,
        "topk_method": _TOPK_NAMES[_topk_method(spec.moe)],
        "moe": _moe(spec.moe),
        "fp8_format": False,
    }


_TOPK_NAMES = {
    _GREEDY: "greedy",
    _GROUP_LIMITED_GREEDY: "group_limited_greedy",
    _NOAUX_TC: "noaux_tc",
}


def _topk_method(moe: MoESpec) -> int:
    if moe.routing.kind == "sigmoid":
        return _NOAUX_TC
    return _GREEDY if moe.routing.num_groups == 1 else _GROUP_LIMITED_GREEDY


def _moe(moe: MoESpec) -> dict[str, Any]:
    method = _topk_method(moe)
    return {
        "num_experts": moe.routing.num_experts,
        "shared_expert_intermediate_size": moe.shared_intermediate_size,
        "top_k": moe.routing.top_k,
        "normalization_mode": _NORMALIZATION_NONE if method == _GREEDY else _DEVICE_LIMITED,
        "device_limited_n_group": moe.routing.num_groups,
        "device_limited_topk_group": moe.routing.top_groups,
        "device_limited_routed_scaling_factor": moe.routing.scaling_factor,
        "topk_method": method,
    }


def _grouped_query(spec: ModelSpec, attention: GroupedQueryAttentionSpec) -> dict[str, Any]:
    config = {
        "num_key_value_heads": attention.num_kv_heads,
        "head_size": attention.head_dim,
        "hidden_act": "silu",
        "attn_bias": attention.qkv_bias,
        "mlp_bias": False,
        "rotary_scaling": _rope_scaling(spec),
        "disable_weight_only_quant_plugin": False,
    }
    if spec.architecture == "qwen2":
        return config | {"qwen_type": "qwen2", "use_logn_attn": False}
    return config | {"residual_mlp": False, "remove_duplicated_kv_heads": False}


def _rope_scaling(spec: ModelSpec) -> dict[str, Any] | None:
    """As Hugging Face states it, which TensorRT-LLM keeps."""
    scaling = spec.rope.scaling
    if scaling is None:
        return None
    kinds = {LinearSpec: "linear", Llama3Spec: "llama3"}
    if type(scaling) not in kinds:
        raise ConfigError("TARGET: TensorRT-LLM 1.2 has no YaRN for this architecture")
    kind = kinds[type(scaling)]
    return {"type": kind, "rope_type": kind, **dataclasses.asdict(scaling)}
