"""The models that speed is measured on: random weights, 391 and 388 million parameters.

REFERENCE_CONFIG has DeepSeek-V2-Lite's form, with its head sizes and latent width; 2 of 16 experts
a token is near its share of 6 in 64. In millions of parameters:

    embedding and head    2 · 32,512 · 1,024                               66.6
    attention             12 · 7.9                                         95.2
    dense MLP             3 · 1,024 · 2,816                                 8.7
    experts               11 · (16 routed + 1 shared) · 3 · 1,024 · 384   220.6
    router, norms                                                           0.2
    together                                                              391.2

GROUPED_QUERY_CONFIG has Llama's form, as DeepSeek's R1 distillations do. Two heads share a key.

    embedding and head    2 · 32,512 · 1,024                               66.6
    attention             24 · 3.1                                         75.5
    MLP                   24 · 3 · 1,024 · 3,328                          245.4
    norms                                                                   0.1
    together                                                              387.6

Run it to write the first one's checkpoint: python perf/reference_model.py OUT
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.errors import DeepseekTritonError

REFERENCE_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 32512,
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 2816,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 384,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


GROUPED_QUERY_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32512,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 3328,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def write_reference_checkpoint(
    out: Path, seed: int = 0, config: Mapping[str, Any] = REFERENCE_CONFIG
) -> Path:
    """Write the checkpoint in float32 (1.6 GB) to the folder `out`, or keep it if it is there."""
    return write_random_checkpoint(out, dict(config), seed)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python perf/reference_model.py OUT")
    try:
        print(write_reference_checkpoint(Path(sys.argv[1])))
    except DeepseekTritonError as error:
        sys.exit(f"error: {error}")
