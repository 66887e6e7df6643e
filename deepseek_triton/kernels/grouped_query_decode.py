"""Grouped-query attention (arXiv 2305.13245) of a decode step on the paged pools."""

from __future__ import annotations

import torch

from deepseek_triton.kernels.combine import combine
from deepseek_triton.kernels.paged_decode import (
    NO_FILTER,
    DecodeTile,
    KeyFilter,
    paged_decode,
    paged_decode_reference,
)


def grouped_query_decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    key_filter: KeyFilter = NO_FILTER,
    tile: DecodeTile | None = None,
) -> torch.Tensor:
    """Return attention [B, H, d] of turned queries [B, H, d] over pools [N, block_size, G · d].

    For the rest see `paged_decode`. Two launches, or one when the keys are not split.
    """
    dim = q.shape[2]
    partials = paged_decode(
        q, k_pool, v_pool, block_tables, context_lens,
        scale=scale, groups=k_pool.shape[2] // dim, value_dim=dim, key_filter=key_filter, tile=tile,
    )  # fmt: skip
    return combine(partials, q.dtype)


def grouped_query_decode_reference(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    key_filter: KeyFilter = NO_FILTER,
) -> torch.Tensor:
    """Compute `grouped_query_decode` in float64 and round once."""
    dim = q.shape[2]
    return paged_decode_reference(
        q, k_pool, v_pool, block_tables, context_lens,
        scale=scale, groups=k_pool.shape[2] // dim, value_dim=dim, key_filter=key_filter,
    )  # fmt: skip
