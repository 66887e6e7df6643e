from __future__ import annotations

from typing import Any

import pytest
import torch

from deepseek_triton.kernels.grouped_query_prefill import (
    grouped_query_prefill,
    grouped_query_prefill_reference,
)
from deepseek_triton.kernels.latent_prefill import (
    latent_attention_prefill,
    latent_attention_prefill_reference,
)
from deepseek_triton.kernels.prefill_attention import (
    PrefillTile,
    prefill_attention,
    prefill_attention_reference,
)
from tests.unit.kernels.paged_cache import angles, paged_cache, randn, relative_error

SMALL = PrefillTile(16, 16, 4, 1)


def running_sum(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def library(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One row by PyTorch: the queries [S, H, d] are the last of the keys [K, G, d]."""
    visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=scale, enable_gqa=True
    ).transpose(0, 1)


@pytest.mark.parametrize("tile", [None, SMALL])
@pytest.mark.parametrize(
    ("new", "context"), [([1], [0]), ([32], [0]), ([33, 1, 16], [0, 40, 16]), ([70, 5], [3, 0])]
)
def test_ragged_rows_equal_pytorchs_attention(
    new: list[int], context: list[int], tile: PrefillTile | None
) -> None:
    totals = [n + c for n, c in zip(new, context, strict=True)]
    q, k, v = randn(sum(new), 3, 24), randn(sum(totals), 3, 16), randn(sum(totals), 3, 20)
    k_rope = randn(sum(totals), 8)
    cu_q, cu_k = running_sum(new), running_sum(totals)
    got = prefill_attention(
        q, k, v, cu_q, cu_k, max_q=max(new), scale=0.2, k_rope=k_rope, tile=tile
    )
    keys = torch.cat((k, k_rope[:, None].expand(-1, 3, -1)), dim=-1)
    for i in range(len(new)):
        rows, seen = slice(*cu_q[i : i + 2].tolist()), slice(*cu_k[i : i + 2].tolist())
        want = library(q[rows], keys[seen], v[seen], 0.2)
        assert relative_error(got[rows], want) < 1e-6
    reference = prefill_attention_reference(q, k, v, cu_q, cu_k, scale=0.2, k_rope=k_rope)
    assert relative_error(got, reference) < 1e-6


def test_half_precision_and_head_major_views() -> None:
    q = randn(20, 4, 16, dtype=torch.float16)
    k, v = (randn(2, 20, 16, dtype=torch.float16).transpose(0, 1) for _ in "kv")
    cu = running_sum([20])
    out = torch.full((20, 4, 16), torch.nan, dtype=torch.float16)
    got = prefill_attention(q, k, v, cu, cu, max_q=20, scale=0.25, out=out, tile=SMALL)
    assert got is out
    assert relative_error(got, library(q, k, v, 0.25)) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("new", "context", "rank", "rope"), [([20], [0], 16, 8), ([1, 30], [33, 16], 40, 12)]
)
def test_a_latent_layer_equals_its_reference(
    new: list[int], context: list[int], rank: int, rope: int, dtype: torch.dtype
) -> None:
    totals = [n + c for n, c in zip(new, context, strict=True)]
    cache = paged_cache(totals, rank + rope, 16, dtype=dtype)
    pool, other = cache.pools[0], cache.pools[0].clone()
    slots = [s[c:] for s, c in zip(cache.row_slots, context, strict=True)]
    key_slots = torch.cat(cache.row_slots) if any(context) else None
    tokens, heads, nope = sum(new), 3, 12
    width = heads * (nope + rope)
    q, kv_a = randn(tokens, width + rank + rope, dtype=dtype).split((width, rank + rope), dim=1)
    weights = (
        randn(heads, nope, rank, dtype=dtype, scale=nope**-0.5),
        randn(heads, rank, 20, dtype=dtype, scale=rank**-0.5),
    )
    rest = (torch.cat(slots).int(), running_sum(new), running_sum(totals), key_slots)
    projections = (kv_a, randn(rank, dtype=dtype), 1e-6, *weights, *angles(tokens, rope, True))
    common: Any = {"scale": 0.2, "interleaved": True}
    want = latent_attention_prefill_reference(q, *projections, other, *rest, **common)
    got = latent_attention_prefill(q, *projections, pool, *rest, max_q=max(new), **common)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    assert relative_error(got, want) < tolerance
    assert torch.equal(pool.isnan(), other.isnan())
    assert relative_error(pool.nan_to_num(), other.nan_to_num()) < tolerance


@pytest.mark.parametrize("context", [0, 20])
def test_grouped_queries_look_at_cached_keys_too(context: int) -> None:
    new, heads, groups, dim = 18, 6, 2, 16
    cache = paged_cache([new + context], groups * dim, 16, pools=2)
    keys, values = (cache.keys(0, i).unflatten(1, (groups, dim)) for i in (0, 1))
    q = randn(new, heads, dim)
    cu_q, cu_k = running_sum([new]), running_sum([new + context])
    key_slots = cache.row_slots[0] if context else None
    args: Any = (q, keys[context:], values[context:], *cache.pools, cu_q, cu_k, key_slots)
    got = grouped_query_prefill(*args, max_q=new, scale=0.25)
    assert relative_error(got, library(q, keys, values, 0.25)) < 1e-6
    assert relative_error(grouped_query_prefill_reference(*args, scale=0.25), got) < 1e-6
