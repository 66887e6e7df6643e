from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepseek_triton.kernels.combine import combine
from deepseek_triton.kernels.grouped_query_decode import (
    grouped_query_decode,
    grouped_query_decode_reference,
)
from deepseek_triton.kernels.latent_decode import latent_decode, latent_decode_reference
from deepseek_triton.kernels.paged_decode import DecodeTile, KeyFilter, choose_tile, paged_decode
from tests.unit.kernels.paged_cache import PagedCache, paged_cache, randn, relative_error

RANK, ROPE = 40, 8
EDGES = [1, 16, 0, 33]  # one key, a full block, a padding row, one more than two blocks
SMALL = DecodeTile(2, 16, 64, 4, 1)  # few programs: the interpreter takes its time for each


def library(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One row's attention by PyTorch: q [H, D], keys and values [K, G, …] → [H, e]."""
    q, keys, values = (x.double() for x in (q, keys, values))
    return torch.nn.functional.scaled_dot_product_attention(
        q[:, None], keys.transpose(0, 1), values.transpose(0, 1), scale=0.2, enable_gqa=True
    )[:, 0]


def latent_row(q: torch.Tensor, cache: PagedCache, row: int) -> torch.Tensor:
    keys = cache.keys(row)[:, None]
    return library(q[row], keys, keys[..., :RANK])


@pytest.mark.parametrize(
    ("heads", "block_size", "tile"),
    [(1, 16, None), (5, 64, SMALL), (20, 16, SMALL), (20, 128, SMALL)],
)
def test_latent_attention_equals_pytorchs(
    heads: int, block_size: int, tile: DecodeTile | None
) -> None:
    cache = paged_cache(EDGES, RANK + ROPE, block_size)
    q = randn(len(EDGES), heads, RANK + ROPE)
    args: Any = (q, cache.pools[0], cache.block_tables, cache.context_lens)
    got = latent_decode(*args, scale=0.2, rank=RANK, tile=tile)
    for row, length in enumerate(EDGES):
        if length:
            assert relative_error(got[row], latent_row(q, cache, row)) < 1e-6
        else:
            assert not got[row].any()
    assert relative_error(latent_decode_reference(*args, scale=0.2, rank=RANK), got) < 1e-6


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "tile"),
    [(4, 4, 16, None), (14, 2, 24, SMALL)],
)
def test_grouped_query_attention_equals_pytorchs(
    heads: int, groups: int, dim: int, tile: DecodeTile | None
) -> None:
    cache = paged_cache(EDGES, groups * dim, 16, pools=2)
    q = randn(len(EDGES), heads, dim)
    args: Any = (q, *cache.pools, cache.block_tables, cache.context_lens)
    got = grouped_query_decode(*args, scale=0.2, tile=tile)
    for row, length in enumerate(EDGES):
        if length:
            keys, values = (cache.keys(row, i).unflatten(1, (groups, dim)) for i in (0, 1))
            assert relative_error(got[row], library(q[row], keys, values)) < 1e-6
    assert relative_error(grouped_query_decode_reference(*args, scale=0.2), got) < 1e-6


@pytest.mark.parametrize("splits", [1, 2, 3, 9])
def test_any_number_of_splits_gives_the_same_result(splits: int) -> None:
    lengths = [100, 0, 16, 77]
    cache = paged_cache(lengths, RANK + ROPE, 32, dtype=torch.float16)
    q = randn(4, 3, RANK + ROPE, dtype=torch.float16)
    tile = DecodeTile(splits, 16, 16, 4, 1)
    args: Any = (q, cache.pools[0], cache.block_tables, cache.context_lens)
    got = latent_decode(*args, scale=0.2, rank=RANK, tile=tile)
    assert relative_error(got, latent_decode_reference(*args, scale=0.2, rank=RANK)) < 1e-3


def test_more_heads_than_a_program_takes_and_queries_that_are_views() -> None:
    cache = paged_cache([40], RANK + ROPE, 16)
    q = randn(1, 128, 5 + RANK + ROPE)[..., 5:]
    tile = DecodeTile(1, 32, 64, 4, 1)
    args: Any = (q, cache.pools[0], cache.block_tables, cache.context_lens)
    got = latent_decode(*args, scale=0.2, rank=RANK, tile=tile)
    assert relative_error(got, latent_decode_reference(*args, scale=0.2, rank=RANK)) < 1e-6


def test_a_table_wider_than_any_row_is_read_only_where_a_row_has_keys() -> None:
    cache = paged_cache([20, 3], RANK + ROPE, 16)
    wide = torch.full((2, 9), 10**6, dtype=torch.int32)
    wide[:, :2] = cache.block_tables
    wide[1, 1] = 10**6
    q = randn(2, 3, RANK + ROPE)
    got = latent_decode(q, cache.pools[0], wide, cache.context_lens, scale=0.2, rank=RANK)
    for row in (0, 1):
        assert relative_error(got[row], latent_row(q, cache, row)) < 1e-6


def test_partials_of_splits_without_keys_are_not_read() -> None:
    cache = paged_cache([16], RANK + ROPE, 16)
    q = randn(1, 2, RANK + ROPE)
    tile = DecodeTile(4, 16, 16, 4, 1)
    partials = paged_decode(
        q, cache.pools[0], None, cache.block_tables, cache.context_lens,
        scale=0.2, groups=1, value_dim=RANK, tile=tile,
    )  # fmt: skip
    assert partials.lse is not None
    assert partials.lse[0, 1:].isneginf().all()
    partials.values[0, 1:] = torch.nan
    got = combine(partials, torch.float32)
    assert relative_error(got[0], latent_row(q, cache, 0)) < 1e-6


class TestKeyFilter:
    LENGTHS = [100, 16, 0, 65]
    HEADS = 6

    def attend(self, keep: KeyFilter, cache: PagedCache, q: torch.Tensor) -> torch.Tensor:
        args: Any = (q, cache.pools[0], cache.block_tables, cache.context_lens)
        got = latent_decode(*args, scale=0.2, rank=RANK, key_filter=keep, tile=SMALL)
        want = latent_decode_reference(*args, scale=0.2, rank=RANK, key_filter=keep)
        assert relative_error(got, want) < 1e-6
        return got

    @pytest.fixture
    def cache(self) -> PagedCache:
        return paged_cache(self.LENGTHS, RANK + ROPE, 16)

    @pytest.fixture
    def q(self) -> torch.Tensor:
        return randn(4, self.HEADS, RANK + ROPE)

    def test_a_head_keeps_its_most_recent_keys_and_the_first(
        self, cache: PagedCache, q: torch.Tensor
    ) -> None:
        retained = torch.tensor([0, 1, 16, 40, 99, 1000], dtype=torch.int32)
        got = self.attend(KeyFilter(retained=retained, sink=3), cache, q)
        keys = cache.keys(0)[:, None]
        chosen = torch.cat((keys[:3], keys[100 - 16 :]))
        want = library(q[0, 2:3], chosen, chosen[..., :RANK])
        assert relative_error(got[0, 2:3], want) < 1e-6

    def test_a_head_without_any_key_gives_zeros(self, cache: PagedCache, q: torch.Tensor) -> None:
        retained = torch.tensor([0, 1, 1, 1, 1, 1], dtype=torch.int32)
        got = self.attend(KeyFilter(retained=retained), cache, q)
        assert not got[:, 0].any()

    def test_only_blocks_of_the_mask_are_read(self, cache: PagedCache, q: torch.Tensor) -> None:
        mask = torch.tensor([[0b0100101], [1], [1], [0b10001]], dtype=torch.int32)
        keep = KeyFilter(block_mask=mask)
        got = self.attend(keep, cache, q)
        for block in (1, 3, 4, 6):  # row 0 does not look at them, whatever they hold
            cache.pools[0][cache.block_tables[0, block].long()] = torch.nan
        args: Any = (q, cache.pools[0], cache.block_tables, cache.context_lens)
        again = latent_decode(*args, scale=0.2, rank=RANK, key_filter=keep, tile=SMALL)
        assert torch.equal(again, got)

    def test_experts_of_key_and_query_must_agree_under_the_mask(
        self, cache: PagedCache, q: torch.Tensor
    ) -> None:
        shape = cache.pools[0].shape[:2]
        experts = torch.arange(shape[0] * shape[1], dtype=torch.int32).view(shape) % 3
        query_experts = torch.tensor([0, 1, 2, 2], dtype=torch.int32)
        keep = KeyFilter(key_experts=experts, query_experts=query_experts)
        self.attend(keep, cache, q)
        mask = torch.tensor([[0b11], [1], [1], [0b10100]], dtype=torch.int32)
        retained = torch.full((self.HEADS,), 90, dtype=torch.int32)
        self.attend(replace(keep, block_mask=mask, retained=retained, sink=4), cache, q)


def test_a_16_bit_tile_without_a_pipeline_is_refused_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = paged_cache([16], RANK + ROPE, 16, dtype=torch.float16)
    q = randn(1, 2, RANK + ROPE, dtype=torch.float16)
    args: Any = (q, cache.pools[0], cache.block_tables, cache.context_lens)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.raises(ValueError, match=r"tile.stages is 1; torch.float16 needs at least 2"):
        latent_decode(*args, scale=0.2, rank=RANK, tile=DecodeTile(1, 16, 16, 4, 1))


def test_the_chosen_layout_fills_the_card_and_no_more() -> None:
    one = choose_tile(1, 1, 16, 576, 1024, torch.bfloat16)
    many = choose_tile(64, 1, 16, 576, 1024, torch.bfloat16)
    assert one.splits == 1024 // 128
    assert many.splits == 2
    assert choose_tile(512, 1, 64, 576, 8192, torch.bfloat16).splits == 1
    assert choose_tile(1, 1, 1, 24, 16, torch.float32).splits == 1


@pytest.mark.parametrize(
    ("lengths", "block_size"), [([5], 16), ([5], 32), ([33, 1], 16), ([40, 0], 16)], ids=str
)
def test_nothing_is_read_beyond_tables_pools_and_queries(
    lengths: list[int], block_size: int
) -> None:
    """In a process of its own, which a read of what is not there would kill."""
    done = subprocess.run(
        [sys.executable, "-c", READ_GUARDED.format(lengths, block_size)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)


READ_GUARDED = """
from deepseek_triton.kernels.latent_decode import latent_decode
from deepseek_triton.kernels.paged_decode import DecodeTile
from tests.unit.kernels.guarded import guarded
from tests.unit.kernels.paged_cache import paged_cache, randn
cache = paged_cache({0}, 48, {1})
parts = (randn(len({0}), 3, 48), cache.pools[0], cache.block_tables, cache.context_lens)
latent_decode(*map(guarded, parts), scale=0.2, rank=40, tile=DecodeTile(2, 64, 16, 4, 1))
"""
