"""Tiny random DeepSeek models of each kind, saved by transformers and kept as the reference."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

VOCAB_SIZE = 131
LATENT_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,  # far from the 1e-6 of the latent norms
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GROUPED_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# Configuration, model and shape of each architecture.
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM, LATENT_SHAPE),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENT_SHAPE),
    "llama": (LlamaConfig, LlamaForCausalLM, GROUPED_SHAPE),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, GROUPED_SHAPE),
}
# With four pairs the ramp is 0, 0, 1/2, 1: both betas, the base and the old context all count.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,  # the sequences below are longer
    "beta_fast": 2,
    "beta_slow": 1,
}
GROUPS = {"n_group": 4, "topk_group": 2}


@dataclass(frozen=True)
class ParityCase:
    """One model: how it differs from its family's shape, and how it is stored."""

    name: str
    family: str  # a key of FAMILIES
    changes: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32  # of the checkpoint
    max_shard_size: str = "5GB"

    def save(self, folder: Path) -> Reference:
        """Write the checkpoint into `folder` and return the model that it holds."""
        config_kind, kind, shape = FAMILIES[self.family]
        torch.manual_seed(0)
        model = kind(config_kind(**{**shape, **self.changes}))
        randomize(model)
        model.to(self.dtype).save_pretrained(folder, max_shard_size=self.max_shard_size)
        return Reference(kind.from_pretrained(folder, dtype=torch.float32).eval())


class DeepseekMoECase(ParityCase):
    """The first DeepSeek-MoE, which is not in transformers: Llama with DeepSeek-V2's experts."""

    def save(self, folder: Path) -> Reference:
        """Write the checkpoint, its experts apart, and return the model that it holds."""
        experts = {key: LATENT_SHAPE[key] for key in _EXPERT_KEYS}
        shape = {**GROUPED_SHAPE, "num_key_value_heads": 4}
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**shape))
        mixture = DeepseekV2Config(**shape, **experts, topk_method="greedy")
        mixture._experts_implementation = "eager"
        for layer in model.model.layers[experts["first_k_dense_replace"] :]:
            layer.mlp = DeepseekV2Moe(mixture)
        randomize(model)
        folder.mkdir(parents=True)
        config = {"model_type": "deepseek", **shape, **experts, "norm_topk_prob": False}
        (folder / "config.json").write_text(json.dumps(config))
        save_file(_with_experts_apart(model.state_dict()), folder / "model.safetensors")
        return Reference(model.eval())


_EXPERT_KEYS = (
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "first_k_dense_replace",
)


def _with_experts_apart(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    apart = {}
    for name, tensor in state.items():
        prefix, stacked, kind = name.partition("experts.")
        if not stacked or prefix.endswith("shared_"):
            apart[name] = tensor.contiguous()
            continue
        for expert, weight in enumerate(tensor):
            parts = {"down_proj": weight}
            if kind == "gate_up_proj":
                gate, up = weight.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up}
            for part, values in parts.items():
                apart[f"{prefix}experts.{expert}.{part}.weight"] = values.contiguous()
    return apart


def randomize(model: torch.nn.Module) -> None:
    """Give every tensor values that matter: norms off 1, biases off 0, decisive routers."""
    generator = torch.Generator().manual_seed(1)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        for name, tensor in tensors:
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                tensor.copy_(1 + 0.3 * noise)
            elif name.endswith("gate.weight"):
                tensor.copy_(0.5 * noise)
            elif "bias" in name:
                tensor.copy_(0.3 * noise)
            elif "inv_freq" not in name:
                tensor.copy_(0.15 * noise)


class Reference:
    """transformers' own answer, one sequence at a time and without a cache."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(
        self, token_ids: NDArray[np.int32]
    ) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]:
        """Return logits [n, V] and the hidden states [n, D] after each layer."""
        hidden: list[NDArray[np.float32]] = []

        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            hidden.append(value.reshape(len(token_ids), -1).numpy().copy())

        hooks = [layer.register_forward_hook(keep) for layer in self.model.model.layers]
        try:
            with torch.no_grad():
                ids = torch.from_numpy(token_ids.astype(np.int64))[None]
                logits = self.model(ids, use_cache=False).logits[0].numpy()
        finally:
            for hook in hooks:
                hook.remove()
        return logits, hidden


def _cases() -> list[ParityCase]:
    v2 = {
        "q_lora_rank": 20,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.7,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
        **GROUPS,
    }
    v3 = {
        "q_lora_rank": 20,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "rope_interleave": True,
        "n_shared_experts": 1,
        **GROUPS,
    }
    one_group = {"n_group": 1, "topk_group": 1}
    return [
        ParityCase("v2_lite", "deepseek_v2", {"topk_method": "greedy"}),
        ParityCase("v2", "deepseek_v2", v2),
        ParityCase("v2_yarn_without_mscale", "deepseek_v2", {**v2, "rope_parameters": YARN}),
        ParityCase(
            "v2_yarn_exact_range",
            "deepseek_v2",
            {**v2, "rope_parameters": {**YARN, "truncate": False}},
        ),
        ParityCase(
            "v2_lite_bias", "deepseek_v2", {"topk_method": "greedy", "attention_bias": True}
        ),
        ParityCase("v2_tied", "deepseek_v2", {**v2, "tie_word_embeddings": True}),
        ParityCase("v2_sharded", "deepseek_v2", v2, max_shard_size="60KB"),
        ParityCase("v2_bf16", "deepseek_v2", v2, dtype=torch.bfloat16),
        ParityCase("v3", "deepseek_v3", v3),
        ParityCase("v3_rotate_halves", "deepseek_v3", {**v3, "rope_interleave": False}),
        ParityCase("v3_bias", "deepseek_v3", {**v3, "attention_bias": True}),
        ParityCase("v3_one_group", "deepseek_v3", {**v3, **one_group, "q_lora_rank": None}),
        ParityCase("v3_not_normalized", "deepseek_v3", {**v3, "norm_topk_prob": False}),
        ParityCase("v3_all_dense", "deepseek_v3", {**v3, "first_k_dense_replace": 3}),
        *_grouped_query_cases(),
        DeepseekMoECase("deepseek_moe", "deepseek"),
    ]


def _grouped_query_cases() -> list[ParityCase]:
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}
    # With the default head of ten, five pairs turn 5.1, 1.4, 0.4, 0.1 and 0.03 times in 32 tokens:
    # one is fast, one between, three are slow.
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 600.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    many_heads = {"num_key_value_heads": 4}
    return [
        ParityCase("llama", "llama"),
        ParityCase("llama_one_head_a_group", "llama", many_heads),
        ParityCase("llama_one_group", "llama", {"num_key_value_heads": 1, "head_dim": 12}),
        ParityCase("llama_bias", "llama", {"attention_bias": True}),
        ParityCase("llama_bf16", "llama", dtype=torch.bfloat16),
        ParityCase("llama3", "llama", {"rope_parameters": llama3, "head_dim": 16}),
        ParityCase("coder_linear_rope", "llama", {**many_heads, "rope_parameters": linear}),
        ParityCase("qwen2", "qwen2"),
        ParityCase("qwen2_tied", "qwen2", {"tie_word_embeddings": True}),
        ParityCase("qwen2_yarn", "qwen2", {"rope_parameters": YARN}),
        ParityCase("qwen2_sharded", "qwen2", max_shard_size="30KB"),
    ]


CASES: dict[str, ParityCase] = {case.name: case for case in _cases()}
