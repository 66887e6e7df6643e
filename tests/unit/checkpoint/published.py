"""config.json of DeepSeek's published models: the keys that decide something, by model name."""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}

_LLM: dict[str, Any] = {
    **_LLAMA,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "vocab_size": 102400,
}

_CODER: dict[str, Any] = {
    **_LLAMA,
    "bos_token_id": 32013,
    "eos_token_id": 32021,
    "max_position_embeddings": 16384,
    "rope_scaling": {"factor": 4.0, "type": "linear"},
    "rope_theta": 100000,
    "vocab_size": 32256,
}

_DISTILL_LLAMA: dict[str, Any] = {
    **_LLAMA,
    "attention_bias": False,
    "bos_token_id": 128000,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}

_DISTILL_QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}

_YARN: dict[str, Any] = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}

_V2: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
    "scoring_func": "softmax",
    "v_head_dim": 128,
    "vocab_size": 102400,
}


def _sizes(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int | None = None
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek-llm-7b": {**_LLM, **_sizes(4096, 11008, 30, 32)},
    "deepseek-llm-67b": {**_LLM, **_sizes(8192, 22016, 95, 64, 8)},
    "deepseek-math-7b": {**_LLM, **_sizes(4096, 11008, 30, 32)},
    "deepseek-coder-1.3b": {**_CODER, **_sizes(2048, 5504, 24, 16)},
    "deepseek-coder-6.7b": {**_CODER, **_sizes(4096, 11008, 32, 32)},
    "deepseek-coder-33b": {**_CODER, **_sizes(7168, 19200, 62, 56, 8)},
    "DeepSeek-R1-Distill-Llama-8B": {
        **_DISTILL_LLAMA,
        **_sizes(4096, 14336, 32, 32, 8),
        "eos_token_id": 128001,
    },
    "DeepSeek-R1-Distill-Llama-70B": {
        **_DISTILL_LLAMA,
        **_sizes(8192, 28672, 80, 64, 8),
        "eos_token_id": [128001, 128008, 128009],
    },
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        **_DISTILL_QWEN,
        **_sizes(1536, 8960, 28, 12, 2),
        "max_window_layers": 21,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "use_mrope": False,
        "vocab_size": 151936,
    },
    "DeepSeek-R1-Distill-Qwen-7B": {
        **_DISTILL_QWEN,
        **_sizes(3584, 18944, 28, 28, 4),
        "max_window_layers": 28,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "use_mrope": False,
    },
    "DeepSeek-R1-Distill-Qwen-14B": {
        **_DISTILL_QWEN,
        **_sizes(5120, 13824, 48, 40, 8),
        "max_window_layers": 48,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
    },
    "DeepSeek-R1-Distill-Qwen-32B": {
        **_DISTILL_QWEN,
        **_sizes(5120, 27648, 64, 40, 8),
        "max_window_layers": 64,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
    },
    "deepseek-moe-16b": {
        **_sizes(2048, 10944, 28, 16),
        "architectures": ["DeepseekForCausalLM"],
        "model_type": "deepseek",
        "attention_bias": False,
        "aux_loss_alpha": 0.001,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_experts_per_tok": 6,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000,
        "scoring_func": "softmax",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "vocab_size": 102400,
    },
    "DeepSeek-V2-Lite": {
        **_V2,
        **_sizes(2048, 10944, 27, 16),
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "q_lora_rank": None,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "topk_method": "greedy",
    },
    "DeepSeek-V2": {
        **_V2,
        **_sizes(5120, 12288, 60, 128),
        "moe_intermediate_size": 1536,
        "n_group": 8,
        "n_routed_experts": 160,
        "q_lora_rank": 1536,
        "routed_scaling_factor": 16.0,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
    },
    "DeepSeek-V3": {
        **_sizes(7168, 18432, 61, 128),
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}
