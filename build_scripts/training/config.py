"""The demo model's shape, as its config.json states it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class DemoConfig:
    """Keys of DeepSeek-V3's config.json; every input width of a matrix is a multiple of 128."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 9
    first_k_dense_replace: int = 1
    intermediate_size: int = 768
    moe_intermediate_size: int = 128
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.5
    num_attention_heads: int = 8
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 32
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    def to_json(self) -> dict[str, Any]:
        """The whole config.json."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "torch_dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_cache": True,
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": self.num_attention_heads,
            "num_nextn_predict_layers": 1,
            "rope_interleave": True,
            "rope_scaling": None,
            **asdict(self),
        }

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> DemoConfig:
        """Read back what `to_json` wrote."""
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})
