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
class LinearSpec:
    """Position interpolation (arXiv 2306.15595): every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Spec:
    """Llama 3.1's scaling (arXiv 2407.21783): slow pairs are divided by `factor`, fast ones kept.

    A pair is fast if it turns more than `high_freq_factor` times over the original context, slow if
    less than `low_freq_factor` times; between them the frequency is mixed.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


RopeScaling = YarnSpec | LinearSpec | Llama3Spec


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the `dim` rotated dimensions of each head."""

    dim: int
    theta: float
    interleaved: bool  # pairs (0,1),(2,3)… rather than (0,dim/2),(1,dim/2+1)…
    scaling: RopeScaling | None = None

    @property
    def yarn(self) -> YarnSpec | None:
        """The scaling, if it is YaRN."""
        return self.scaling if isinstance(self.scaling, YarnSpec) else None


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

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the KV pools of a layer."""
        return ("kv",)

    @property
    def pool_width(self) -> int:
        """Width of a row of each pool."""
        return self.latent_width

    @property
    def num_kv_heads(self) -> int:
        """Keys of a row: all heads share one."""
        return 1


@dataclass(frozen=True)
class GroupedQueryAttentionSpec:
    """Attention whose heads share keys and values in groups (arXiv 2305.13245).

    num_kv_heads divides num_heads: 1 is multi-query attention, num_heads multi-head attention.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int  # all of it is rotated
    softmax_scale: float
    qkv_bias: bool  # on the q, k and v projections
    o_bias: bool

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the KV pools of a layer: rotated keys, and values."""
        return ("k", "v")

    @property
    def pool_width(self) -> int:
        """Width of a row of each pool."""
        return self.num_kv_heads * self.head_dim


AttentionSpec = LatentAttentionSpec | GroupedQueryAttentionSpec
Architecture = Literal["deepseek", "deepseek_v2", "deepseek_v3", "llama", "qwen2"]


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
    """A decoder whose layers share one kind of attention; some have a dense MLP, some experts."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int  # of the dense layers
    moe_layers: tuple[int, ...]  # indices of the layers with experts, ascending
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention: AttentionSpec
    rope: RopeSpec
    moe: MoESpec | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


LATENT_NORM_EPS = 1e-6
"""Epsilon of q_a_layernorm and kv_a_layernorm: transformers does not use rms_norm_eps there."""
