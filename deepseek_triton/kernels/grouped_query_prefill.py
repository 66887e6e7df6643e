"""Grouped-query attention (arXiv 2305.13245) of a prefill step."""

from __future__ import annotations

import torch

from deepseek_triton.kernels.prefill_attention import (
    prefill_attention,
    prefill_attention_reference,
)


def grouped_query_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    key_slots: torch.Tensor | None,
    *,
    max_q: int,
    scale: float,
) -> torch.Tensor:
    """Return attention [T, H, d] of turned queries q [T, H, d].

    k, v [T, G, d] are the new tokens' own, k turned; with key_slots [K] int64, the pool slots of
    all keys of all rows, all are gathered from the pools [N, block_size, G · d] instead. For the
    rest see `prefill_attention`.
    """
    if key_slots is not None:
        k, v = _gather(k_pool, key_slots, q.shape[2]), _gather(v_pool, key_slots, q.shape[2])
    return prefill_attention(q, k, v, cu_q, cu_k, max_q=max_q, scale=scale)


def grouped_query_prefill_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    key_slots: torch.Tensor | None,
    *,
    scale: float,
) -> torch.Tensor:
    """Compute `grouped_query_prefill` in float64 and round once."""
    if key_slots is not None:
        k, v = _gather(k_pool, key_slots, q.shape[2]), _gather(v_pool, key_slots, q.shape[2])
    return prefill_attention_reference(q, k, v, cu_q, cu_k, scale=scale)


def _gather(pool: torch.Tensor, key_slots: torch.Tensor, dim: int) -> torch.Tensor:
    return pool.view(-1, pool.shape[-1]).index_select(0, key_slots).unflatten(1, (-1, dim))
