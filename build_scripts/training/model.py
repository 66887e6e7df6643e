"""DeepSeek-V3's architecture (arXiv 2412.19437) for training: latent attention, sigmoid routing.

Parameters carry the names of the Hugging Face checkpoint, except that experts are stacked.
All experts run on all tokens and a gate of zero drops the unchosen ones: at this width that is
faster than gathering, and no token is ever dropped.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import DemoConfig


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) → the same shape and dtype."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (0,1), (2,3)… of the last axis.

    x: (B, S, H, rope); cos, sin: (S, 1, rope/2). Queries and keys come out with the first members
    of all pairs before the second ones: scores do not depend on that order.
    """
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention in its expanded form (arXiv 2405.04434, section 2.1)."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        c = self.config = config
        heads, qk_width = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
        self.q_a_proj = _linear(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, 1e-6)
        self.q_b_proj = _linear(c.q_lora_rank, heads * qk_width)
        self.kv_a_proj_with_mqa = _linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, 1e-6)
        self.kv_b_proj = _linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = _linear(heads * c.v_head_dim, c.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, S, hidden) → (B, S, hidden), causal."""
        c, (batch, length, _) = self.config, x.shape
        heads = c.num_attention_heads
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, length, heads, -1)
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, heads, -1)
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k_rope = rotate(k_rope[:, :, None], cos, sin).expand(-1, -1, heads, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), -1).transpose(1, 2)
        k = torch.cat((k_nope, k_rope), -1).transpose(1, 2)
        # Fused kernels want values as wide as keys.
        v = F.pad(v, (0, k.shape[-1] - c.v_head_dim)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., : c.v_head_dim]
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """Gated MLP of the dense layers and of the shared expert."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = _linear(hidden, width)
        self.up_proj = _linear(hidden, width)
        self.down_proj = _linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(…, hidden) → (…, hidden)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores; a bias steers the choice but not the weights (arXiv 2412.19437, 2.1.2)."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.e_score_correction_bias: Tensor
        self.load: Tensor
        self.weight = nn.Parameter(torch.zeros(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.register_buffer("load", torch.zeros(config.n_routed_experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(T, hidden) → gates (T, experts), zero where not chosen. Adds to `load` in training."""
        c = self.config
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
            mask = _top(scores.detach() + self.e_score_correction_bias, c.num_experts_per_tok)
        if self.training:
            self.load += mask.sum(0)
        gates = scores * mask
        return gates / (gates.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor

    @torch.no_grad()
    def update_bias(self, rate: float) -> None:
        """Raise the bias of experts below the mean load, lower the others; forget the loads."""
        self.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class MoE(nn.Module):
    """Routed experts plus one shared expert."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        shape = (config.n_routed_experts, config.moe_intermediate_size, config.hidden_size)
        self.gate = Router(config)
        self.gate_proj = nn.Parameter(torch.empty(shape))
        self.up_proj = nn.Parameter(torch.empty(shape))
        self.down_proj = nn.Parameter(torch.empty(shape))  # transposed with respect to the file
        width = config.moe_intermediate_size * config.n_shared_experts
        self.shared_experts = MLP(config.hidden_size, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, hidden) → (B, S, hidden)."""
        flat = x.reshape(-1, x.shape[-1])
        gates = self.gate(flat).to(x.dtype)
        inner = F.silu(F.linear(flat, self.gate_proj.flatten(0, 1)))
        inner = inner * F.linear(flat, self.up_proj.flatten(0, 1))
        inner = (inner.view(-1, *self.down_proj.shape[:2]) * gates[:, :, None]).flatten(1)
        routed = inner @ self.down_proj.flatten(0, 1).to(inner.dtype)
        return routed.view_as(x) + self.shared_experts(x)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: DemoConfig, index: int) -> None:
        super().__init__()
        c = config
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        dense = index < c.first_k_dense_replace
        self.mlp: nn.Module = MLP(c.hidden_size, c.intermediate_size) if dense else MoE(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, S, hidden) → (B, S, hidden)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class NextTokenLayer(Layer):
    """Multi-token prediction: from token t's state and token t+1 to token t+2 (section 2.2)."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__(config, config.num_hidden_layers)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = _linear(2 * config.hidden_size, config.hidden_size)
        self.shared_head = nn.ModuleDict(
            {"norm": RMSNorm(config.hidden_size, config.rms_norm_eps)}  # its head is lm_head
        )

    def combine(self, hidden: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """State after the final norm, next token's embedding → input of the head; (B, S, hidden).

        The token comes first, as in the released weights.
        """
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        return self.shared_head["norm"](self(x, cos, sin))


class DemoModel(nn.Module):
    """The decoder, its head, and one layer of multi-token prediction."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = c = config
        self.cos: Tensor
        self.sin: Tensor
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, index) for index in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = _linear(c.hidden_size, c.vocab_size)
        self.mtp = NextTokenLayer(c)
        pairs = torch.arange(0, c.qk_rope_head_dim, 2).float() / c.qk_rope_head_dim
        angles = torch.outer(torch.arange(c.max_position_embeddings).float(), c.rope_theta**-pairs)
        self.register_buffer("cos", angles.cos()[:, None], persistent=False)
        self.register_buffer("sin", angles.sin()[:, None], persistent=False)
        self.apply(self._initialise)

    def hidden(self, ids: Tensor) -> Tensor:
        """(B, S) ids → (B, S, hidden) after the final norm."""
        x = self._embed(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def draft_hidden(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """State for the token after `next_ids`: (B, S, hidden), (B, S) → (B, S, hidden)."""
        cos, sin = self.cos[: next_ids.shape[1]], self.sin[: next_ids.shape[1]]
        return self.mtp.combine(hidden, self._embed(next_ids), cos, sin)

    def losses(self, window: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S+2) ids → mean cross-entropy of the next token and of the one after, in nats."""
        ids, following, after = window[:, :-2], window[:, 1:-1], window[:, 2:]
        hidden = self.hidden(ids)
        drafted = self.draft_hidden(hidden, following)
        return self._cross_entropy(hidden, following), self._cross_entropy(drafted, after)

    def routers(self) -> list[Router]:
        """All routers, that of the multi-token-prediction layer included."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def _embed(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        device = x.device.type
        # The residual stream follows autocast: bfloat16 in training, float32 in evaluation.
        return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x

    def _cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(hidden).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, MoE):
            for weight in (module.gate_proj, module.up_proj, module.down_proj, module.gate.weight):
                nn.init.normal_(weight, std=self.config.initializer_range)


def _top(scores: Tensor, count: int) -> Tensor:
    """(T, N) → 1 for the `count` largest of each row, else 0: comparisons fuse, a sort does not."""
    index = torch.arange(scores.shape[1], device=scores.device)
    left, right = scores[:, :, None], scores[:, None, :]
    ahead = (right > left) | ((right == left) & (index < index[:, None]))
    return (ahead.sum(-1) < count).to(scores.dtype)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)
