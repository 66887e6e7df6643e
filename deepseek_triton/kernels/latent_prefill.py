"""Latent attention of a prefill step: keys and values of all heads expanded, then flash attention.

Expanded keys take 192 + 128 numbers a pair of tokens and head where the absorbed form takes
576 + 512, and the expansion is one matrix product a step. Keys that were cached before this step
are gathered from the pool and expanded with the new ones.
"""

from __future__ import annotations

import torch

from deepseek_triton.kernels.append_kv import append_latent, append_latent_reference
from deepseek_triton.kernels.prefill_attention import (
    prefill_attention,
    prefill_attention_reference,
)
from deepseek_triton.kernels.rotary import rotary, rotary_reference


def latent_attention_prefill(
    q: torch.Tensor,
    kv_a: torch.Tensor,
    kv_norm: torch.Tensor,
    eps: float,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    key_slots: torch.Tensor | None,
    *,
    max_q: int,
    scale: float,
    interleaved: bool,
) -> torch.Tensor:
    """Return o [T, H · v] of the new tokens of ragged rows. Mutates pool, and turns q in place.

    q [T, H · (nope + rope)], kv_a [T, rank + rope]; w_uk [H, nope, rank], w_uv [H, rank, v];
    key_slots [K] int64 the pool slots of all keys of all rows, or None if no row has keys besides
    its new tokens; cu_q, cu_k, max_q as `prefill_attention` takes them, the others as
    `append_latent`. Takes H · (nope + v) numbers of memory for each key.
    """
    heads, nope, rank = w_uk.shape
    rows = append_latent(kv_a, kv_norm, eps, cos, sin, pool, slots, interleaved=interleaved)
    if key_slots is not None:
        rows = pool.view(-1, pool.shape[-1]).index_select(0, key_slots)
    q_heads = q.unflatten(1, (heads, -1))
    q_rope = q_heads[..., nope:]
    rotary(q_rope, cos, sin, interleaved=interleaved, out=q_rope)
    latent = rows[:, :rank]
    k_nope = torch.mm(latent, w_uk.view(-1, rank).T).unflatten(1, (heads, nope))
    v = torch.bmm(latent.expand(heads, -1, -1), w_uv).transpose(0, 1)
    out = prefill_attention(
        q_heads, k_nope, v, cu_q, cu_k, max_q=max_q, scale=scale, k_rope=rows[:, rank:]
    )
    return out.flatten(1)


def latent_attention_prefill_reference(
    q: torch.Tensor,
    kv_a: torch.Tensor,
    kv_norm: torch.Tensor,
    eps: float,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    key_slots: torch.Tensor | None,
    *,
    scale: float,
    interleaved: bool,
) -> torch.Tensor:
    """Compute `latent_attention_prefill` with float64 sums and q as it is. Mutates pool."""
    heads, nope, rank = w_uk.shape
    rows = append_latent_reference(
        kv_a, kv_norm, eps, cos, sin, pool, slots, interleaved=interleaved
    )
    if key_slots is not None:
        rows = pool.view(-1, pool.shape[-1])[key_slots]
    q_nope, q_rope = q.unflatten(1, (heads, -1)).split((nope, cos.shape[-1]), dim=-1)
    turned = rotary_reference(q_rope, cos, sin, interleaved=interleaved)
    wide = rows.double()
    k = torch.einsum("kr,hnr->khn", wide[:, :rank], w_uk.double())
    v = torch.einsum("kr,hrv->khv", wide[:, :rank], w_uv.double())
    out = prefill_attention_reference(
        torch.cat((q_nope, turned), dim=-1).double(), k, v, cu_q, cu_k,
        scale=scale, k_rope=wide[:, rank:],
    )  # fmt: skip
    return out.flatten(1).to(q.dtype)
