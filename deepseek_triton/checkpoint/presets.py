"""Small configs of each supported kind, in Hugging Face form, by the name that ARCH takes."""

from __future__ import annotations

import copy
from typing import Any

from deepseek_triton.errors import ConfigError

_COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
}

_EXPERTS: dict[str, Any] = {"first_k_dense_replace": 1, "moe_layer_freq": 1}

_LATENT: dict[str, Any] = {
    **_EXPERTS,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "kv_lora_rank": 64,
}

# DeepSeek-V2-Lite's routing, and that of the first DeepSeek-MoE.
_GREEDY: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}

_YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
}

_PRESETS: dict[str, dict[str, Any]] = {
    "v2-lite": {
        **_LATENT,
        **_GREEDY,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
    },
    "v2": {
        **_LATENT,
        "model_type": "deepseek_v2",
        "q_lora_rank": 96,
        "moe_intermediate_size": 48,
        "n_routed_experts": 16,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 4.0,
        "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "v3": {
        **_LATENT,
        "model_type": "deepseek_v3",
        "q_lora_rank": 96,
        "moe_intermediate_size": 48,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "rope_interleave": True,
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "llama": {  # as DeepSeek-R1-Distill-Llama
        "model_type": "llama",
        "num_key_value_heads": 2,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    },
    "coder": {  # as DeepSeek-Coder
        "model_type": "llama",
        "rope_theta": 100000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "max_position_embeddings": 8192,
    },
    "qwen2": {  # as DeepSeek-R1-Distill-Qwen
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": False,
        "sliding_window": None,
    },
    "moe": {  # as DeepSeek-MoE-16b
        **_EXPERTS,
        **_GREEDY,
        "model_type": "deepseek",
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}

PRESETS = tuple(_PRESETS)


def preset_config(name: str) -> dict[str, Any]:
    """Return a config of its own for one of PRESETS; ConfigError lists them for another name."""
    if name not in _PRESETS:
        raise ConfigError(f"ARCH: {name!r} is unknown; it must be one of {', '.join(PRESETS)}")
    return copy.deepcopy(_COMMON | _PRESETS[name])
