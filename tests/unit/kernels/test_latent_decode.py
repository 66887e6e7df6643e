from __future__ import annotations

from typing import Any

import pytest
import torch

from deepseek_triton.kernels.combine import (
    combine,
    combine_project,
    combine_project_reference,
    combine_reference,
)
from deepseek_triton.kernels.latent_decode import (
    latent_attention_decode,
    latent_attention_decode_reference,
)
from deepseek_triton.kernels.latent_query import latent_query, latent_query_reference
from deepseek_triton.kernels.paged_decode import Partials
from tests.unit.kernels.paged_cache import RNG, angles, paged_cache, randn, relative_error

NOPE, VALUE = 12, 20
INF = float("inf")


def layer(
    contexts: list[int], heads: int, rank: int, rope: int, dtype: torch.dtype, interleaved: bool
) -> tuple[Any, ...]:
    batch = len(contexts)
    width = heads * (NOPE + rope)
    q, kv_a = randn(batch, width + rank + rope, dtype=dtype).split((width, rank + rope), dim=1)
    norm = randn(rank, dtype=dtype)
    w_uk = randn(heads, NOPE, rank, dtype=dtype, scale=NOPE**-0.5)
    w_uv = randn(heads, rank, VALUE, dtype=dtype, scale=rank**-0.5)
    return q, kv_a, norm, w_uk, w_uv, *angles(batch, rope, interleaved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("contexts", "heads", "rank", "rope", "block_size"),
    [([33], 3, 16, 8, 32), ([1, 0, 16, 17], 4, 40, 12, 16), ([5] * 18, 2, 16, 8, 16)],
)
def test_a_layer_equals_its_parts(
    contexts: list[int],
    heads: int,
    rank: int,
    rope: int,
    block_size: int,
    dtype: torch.dtype,
    interleaved: bool,
) -> None:
    cache = paged_cache(contexts, rank + rope, block_size, dtype=dtype)
    pool, other = cache.pools[0], cache.pools[0].clone()
    q, kv_a, norm, w_uk, w_uv, cos, sin = layer(contexts, heads, rank, rope, dtype, interleaved)
    rest = (cache.last_slots, cache.block_tables, cache.context_lens)
    common: Any = {"scale": 0.2, "interleaved": interleaved}
    projections = (q, kv_a, norm, 1e-6, w_uk, w_uv, cos, sin)
    got = latent_attention_decode(*projections, pool, *rest, **common)
    want = latent_attention_decode_reference(*projections, other, *rest, **common)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    assert relative_error(got, want) < tolerance
    assert torch.equal(pool.isnan(), other.isnan())
    assert relative_error(pool.nan_to_num(), other.nan_to_num()) < tolerance


def test_padding_rows_write_nothing_and_give_zeros() -> None:
    cache = paged_cache([0, 0], 24, 16)
    q, kv_a, norm, w_uk, w_uv, cos, sin = layer([0, 0], 2, 16, 8, torch.float32, True)
    got = latent_attention_decode(
        q, kv_a, norm, 1e-6, w_uk, w_uv, cos, sin,
        cache.pools[0], cache.last_slots, cache.block_tables, cache.context_lens,
        scale=0.2, interleaved=True,
    )  # fmt: skip
    assert not got.any()
    assert cache.pools[0].isnan().all()


@pytest.mark.parametrize("batch", [1, 2, 17, 65])
def test_queries_go_into_the_latent_space_by_head(batch: int) -> None:
    cache = paged_cache([1] * batch, 48, 16)
    q, kv_a, norm, w_uk, _, cos, sin = layer([1] * batch, 3, 40, 8, torch.float32, False)
    args: Any = (q, kv_a, norm, 1e-6, w_uk, cos, sin, cache.pools[0], cache.last_slots)
    got = latent_query(*args, interleaved=False, block_r=16)
    want = latent_query_reference(*args, interleaved=False)
    by_hand = q.view(batch, 3, NOPE + 8)[:, 1, :NOPE] @ w_uk[1]
    assert relative_error(got, want) < 1e-6
    assert relative_error(got[:, 1, :40], by_hand) < 1e-6


class TestCombine:
    def partials(self, batch: int, splits: int, rank: int) -> Partials:
        values, lse = randn(batch, splits, 3, rank), randn(batch, splits, 3, scale=4)
        empty = torch.rand(batch, splits, 3, generator=RNG) < 0.3
        empty[0], empty[1:, 0] = True, False  # the first row has no keys
        values[empty], lse[empty] = torch.nan, -INF
        return Partials(values, lse)

    @pytest.mark.parametrize("splits", [2, 5, 16])
    def test_splits_are_weighted_by_their_share_of_the_softmax(self, splits: int) -> None:
        partials = self.partials(4, splits, 24)
        assert partials.lse is not None
        share = torch.exp2(partials.lse[1, :, 2].double())
        values = partials.values[1, :, 2].nan_to_num()
        want = (values * (share / share.sum())[:, None]).sum(0)
        got = combine(partials, torch.float32)
        assert not got[0].any()
        assert torch.allclose(got[1, 2].double(), want, atol=1e-5)
        assert relative_error(got, combine_reference(partials, torch.float32)) < 1e-6

    @pytest.mark.parametrize(("batch", "splits"), [(1, 1), (1, 6), (2, 1), (3, 4), (40, 2)])
    def test_joining_and_projecting_is_doing_one_after_the_other(
        self, batch: int, splits: int
    ) -> None:
        partials = self.partials(batch + 1, splits, 40)
        if splits == 1:  # then there is nothing to join
            partials = Partials(randn(batch + 1, 1, 3, 40), None)
        w_uv = randn(3, 40, VALUE)
        got = combine_project(partials, w_uv)
        joined = combine_reference(partials, torch.float64)
        want = torch.einsum("bhr,hrv->bhv", joined, w_uv.double()).flatten(1)
        assert relative_error(got, want) < 1e-6
        assert relative_error(combine_project_reference(partials, w_uv), want) < 1e-6
