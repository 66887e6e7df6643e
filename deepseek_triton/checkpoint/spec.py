"""The shape of a DeepSeek model, free of any file format: what export, KV cache and build need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class YarnSpec:
    """YaRN rope scaling (arXiv 2309.00071), as DeepSeek's configs state it."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # round the correction range outwards, as transformers does by default


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the `dim` rotated dimensions of each head."""

    dim: int
    theta: float
    interleaved: bool  # pairs (0,1),(2,3)… rather than (0,dim/2),(1,dim/2+1)…
    yarn: YarnSpec | None = None


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1)."""

    num_heads: int
    q_lora_rank: int | None  # None: one full-rank query projection
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float  # yarn's mscale² included
    bias: bool = False  # on q_a/kv_a/o projections (config.attention_bias)

    @property
    def qk_head_dim(self) -> int:
        """Query and key width of one head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Width of one cached row: compressed KV, then the shared rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class RoutingSpec:
    """How a token picks its experts.

    softmax: V2. Greedy top_k, or limited to `top_groups` groups scored by their best expert.
    sigmoid: V3. Bias-corrected choice, groups scored by the sum of their two best experts.
    """

    kind: Literal["softmax", "sigmoid"]
    num_experts: int
    top_k: int
    num_groups: int  # 1 = no group limit
    top_groups: int
    scaling_factor: float
    normalize: bool  # divide the chosen weights by their sum (V3)


@dataclass(frozen=True)
class MoESpec:
    """Mixture of experts of the layers that have one."""

    routing: RoutingSpec
    expert_intermediate_size: int
    shared_intermediate_size: int  # 0 = no shared expert; all shared experts as one MLP


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of latent-attention layers, some with a dense MLP, the rest with experts."""

    architecture: Literal["deepseek_v2", "deepseek_v3"]
    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int  # of the dense layers
    moe_layers: tuple[int, ...]  # indices of the layers with experts, ascending
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention: LatentAttentionSpec
    rope: RopeSpec
    moe: MoESpec | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


LATENT_NORM_EPS = 1e-6
"""Epsilon of q_a_layernorm and kv_a_layernorm: transformers does not use rms_norm_eps there."""
