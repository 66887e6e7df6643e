"""Latent attention of a decode step on the paged pool: three launches a layer.

latent_query      queries into the latent space, RoPE, the norm and cache write of the new row
paged_decode      the attention of each split of the keys; on Hopper latent_decode_hopper does it
combine_project   the splits joined, and each head's result back from the latent space; for several
                  rows in many splits cuBLAS is faster at the second
"""

from __future__ import annotations

import torch

from deepseek_triton.kernels.combine import combine, combine_project
from deepseek_triton.kernels.latent_decode_hopper import fits, latent_splits
from deepseek_triton.kernels.latent_query import latent_query, latent_query_reference
from deepseek_triton.kernels.paged_decode import (
    NO_FILTER,
    DecodeTile,
    KeyFilter,
    Partials,
    paged_decode,
    paged_decode_reference,
)

_FEW_SPLITS = 4


def latent_decode(
    q: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    rank: int,
    key_filter: KeyFilter = NO_FILTER,
    tile: DecodeTile | None = None,
) -> torch.Tensor:
    """Return attention [B, H, rank] of queries [B, H, rank + rope] in the latent space.

    pool [N, block_size, rank + rope]; for the rest see `paged_decode`. Two launches, or one when
    the keys are not split.
    """
    partials = _splits(q, pool, block_tables, context_lens, scale, rank, key_filter, tile)
    return combine(partials, q.dtype)


def _splits(
    q: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    rank: int,
    key_filter: KeyFilter,
    tile: DecodeTile | None,
) -> Partials:
    if tile is None and key_filter is NO_FILTER and fits(q, pool, rank):
        return latent_splits(q, pool, block_tables, context_lens, scale=scale, rank=rank)
    return paged_decode(
        q, pool, None, block_tables, context_lens,
        scale=scale, groups=1, value_dim=rank, key_filter=key_filter, tile=tile,
    )  # fmt: skip


def latent_decode_reference(
    q: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    rank: int,
    key_filter: KeyFilter = NO_FILTER,
) -> torch.Tensor:
    """Compute `latent_decode` in float64 and round once."""
    return paged_decode_reference(
        q, pool, None, block_tables, context_lens,
        scale=scale, groups=1, value_dim=rank, key_filter=key_filter,
    )  # fmt: skip


def latent_attention_decode(
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
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    interleaved: bool,
    key_filter: KeyFilter = NO_FILTER,
    tile: DecodeTile | None = None,
) -> torch.Tensor:
    """Return o [B, H · v] of one new token a row, whose cache row is written first. Mutates pool.

    q [B, H · (nope + rope)], kv_a [B, rank + rope], w_uk [H, nope, rank] and w_uv [H, rank, v],
    contiguous; the others as `latent_query` and `paged_decode` take them. A padding row has slot −1
    and context length 0; its result is 0.
    """
    query = latent_query(
        q, kv_a, kv_norm, eps, w_uk, cos, sin, pool, slots, interleaved=interleaved
    )
    partials = _splits(
        query, pool, block_tables, context_lens, scale, len(kv_norm), key_filter, tile
    )
    if len(q) == 1 or partials.values.shape[1] <= _FEW_SPLITS:
        return combine_project(partials, w_uv)
    latent = combine(partials, q.dtype)
    out = torch.empty(len(q), w_uv.shape[0], w_uv.shape[2], dtype=q.dtype, device=q.device)
    torch.bmm(latent.transpose(0, 1), w_uv, out=out.transpose(0, 1))
    return out.flatten(1)


def latent_attention_decode_reference(
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
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    interleaved: bool,
    key_filter: KeyFilter = NO_FILTER,
) -> torch.Tensor:
    """Compute `latent_attention_decode` with float64 sums, rounding where it does. Mutates pool."""
    query = latent_query_reference(
        q, kv_a, kv_norm, eps, w_uk, cos, sin, pool, slots, interleaved=interleaved
    )
    latent = latent_decode_reference(
        query, pool, block_tables, context_lens,
        scale=scale, rank=len(kv_norm), key_filter=key_filter,
    )  # fmt: skip
    return torch.einsum("bhr,hrv->bhv", latent.double(), w_uv.double()).flatten(1).to(q.dtype)
