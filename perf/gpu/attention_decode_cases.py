"""Decode attention at DeepSeek-V2-Lite, V3 and Llama shapes, and other tiles of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from check_data import DEVICE, DTYPE, Case, randn, relative, tile_name

from deepseek_triton.kernels.append_kv import append_grouped_query, append_grouped_query_reference
from deepseek_triton.kernels.combine import (
    ProjectTile,
    combine_project,
    combine_project_reference,
)
from deepseek_triton.kernels.grouped_query_decode import (
    grouped_query_decode,
    grouped_query_decode_reference,
)
from deepseek_triton.kernels.latent_decode import (
    latent_attention_decode,
    latent_attention_decode_reference,
    latent_decode,
    latent_decode_reference,
)
from deepseek_triton.kernels.latent_query import latent_query
from deepseek_triton.kernels.paged_decode import (
    DecodeTile,
    KeyFilter,
    Partials,
    paged_decode,
)

RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128
WIDTH = RANK + ROPE
BLOCK_SIZE = 64
SCALE = (NOPE + ROPE) ** -0.5
CACHE = 400e6  # bytes of different data in turn: several times the L2
EDGES = (1, 63, 64, 65, 0, 128, 700, 1024, 3, 0, 1000)  # context lengths; 0 is a padding row


def decode_cases(sweep: bool) -> Iterator[Case]:
    """Yield every case; with `sweep` also those of other tiles."""
    yield from latent_checks()
    for batch, context in ((1, 1024), (8, 1024), (64, 1024), (1, 8192), (8, 8192), (64, 8192)):
        yield latent_whole(batch, context, 16)
        yield from latent_parts(batch, context, 16)
        if sweep and (context == 1024 or batch == 64):
            yield from decode_sweep(batch, context, 16)
    for batch, splits in ((8, 8), (8, 16), (64, 2), (64, 4)) if sweep else ():
        yield from combine_sweep(batch, splits)
    for batch in (1, 8, 64):
        yield latent_whole(batch, 1024, 128)
        yield latent_bare(batch, 1024, 128)
        if sweep and batch == 64:
            yield from decode_sweep(batch, 1024, 128)
        yield grouped(batch, 1024)


@dataclass(frozen=True)
class Cache:
    """A pool whose unused rows are NaN, and `copies` sets of block tables into it."""

    pool: torch.Tensor
    tables: torch.Tensor  # [copies, B, M] int32
    lens: torch.Tensor  # [B] int32
    slots: torch.Tensor  # [copies, B] int32 slots of the last keys; −1 in padding rows


def make_cache(contexts: list[int], width: int, copies: int, block_size: int = BLOCK_SIZE) -> Cache:
    """Blocks in random order, random rows in those that a context covers."""
    batch, blocks = len(contexts), max(1, -(-max(contexts) // block_size))
    count = copies * batch * blocks
    tables = torch.randperm(count, device=DEVICE).view(copies, batch, blocks).int()
    lens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    pool = torch.full((count, block_size, width), torch.nan, dtype=DTYPE, device=DEVICE)
    offsets = torch.arange(blocks * block_size, device=DEVICE)
    used = offsets < lens[:, None]
    all_slots = tables.long().repeat_interleave(block_size, 2) * block_size + offsets % block_size
    kept = all_slots[:, used].flatten()
    pool.view(-1, width)[kept] = randn(len(kept), width)
    last = all_slots.gather(2, (lens.long() - 1).clamp(min=0).expand(copies, -1)[..., None])[..., 0]
    slots = torch.where(lens > 0, last, -1).int()
    return Cache(pool, tables, lens, slots)


def copies_for(nbytes: float) -> int:
    """Return how many sets of data to go through in turn."""
    return max(2, min(24, int(CACHE / nbytes)))


def decode_bytes(contexts: list[int]) -> float:
    """Bytes of the keys."""
    return sum(contexts) * WIDTH * 2.0


def latent_bare(
    batch: int, context: int, heads: int, tile: DecodeTile | None = None, name: str = ""
) -> Case:
    """The attention alone: splits and their combination."""
    contexts = [context] * batch
    nbytes = decode_bytes(contexts)

    def prepare() -> Callable[[int], torch.Tensor]:
        cache = make_cache(contexts, WIDTH, copies_for(nbytes))
        q = randn(batch, heads, WIDTH)

        def arguments(i: int) -> tuple[torch.Tensor, ...]:
            return q, cache.pool, cache.tables[i % len(cache.tables)], cache.lens

        def run(i: int) -> torch.Tensor:
            return latent_decode(*arguments(i), scale=SCALE, rank=RANK, tile=tile)

        run.want = lambda i: latent_decode_reference(*arguments(i), scale=SCALE, rank=RANK)
        return run

    return Case(
        name or f"latent_decode b{batch} ctx{context} h{heads}",
        prepare, lambda run: relative(run(1), run.want(1)), nbytes,
        2.0 * batch * context * heads * (WIDTH + RANK),
    )  # fmt: skip


def decode_sweep(batch: int, context: int, heads: int) -> Iterator[Case]:
    """Yield `latent_bare` with other splits and tiles."""
    tiles = ((64, 16, 4, 2), (64, 16, 8, 2), (32, 16, 4, 2), (32, 16, 4, 3))
    if heads > 16:
        tiles = ((64, 32, 4, 2), (64, 32, 8, 2), (32, 64, 8, 2))
    rows = batch * max(1, heads // 32)
    splits = sorted({max(1, min(64, round(132 / rows * f))) for f in (0.5, 1, 2, 4)})
    for block_n, block_h, warps, stages in tiles:
        for count in splits:
            tile = DecodeTile(count, block_n, block_h, warps, stages)
            name = f"  s{count} n{block_n} h{block_h} w{warps} st{stages}"
            yield latent_bare(batch, context, heads, tile, f"b{batch} ctx{context}{name}")


def combine_sweep(batch: int, splits: int, heads: int = 16) -> Iterator[Case]:
    """Yield the last launch with other tiles."""

    def prepare(tile: ProjectTile) -> Callable[[int], torch.Tensor]:
        w_uv = [randn(heads, RANK, VALUE, scale=RANK**-0.5) for _ in range(24)]
        values = randn(batch, splits, heads, RANK)
        lse = torch.randn(batch, splits, heads, device=DEVICE)
        partials = Partials(values, lse if splits > 1 else None)

        def run(i: int) -> torch.Tensor:
            return combine_project(partials, w_uv[i % 24], tile=tile)

        run.want = lambda: combine_project_reference(partials, w_uv[0])
        return run

    for sizes in (
        (64, 128, 4, 3),
        (64, 64, 4, 4),
        (32, 128, 4, 3),
        (32, 64, 4, 4),
        (64, 128, 8, 3),
    ):
        tile = ProjectTile(*sizes)
        yield Case(
            f"combine b{batch} s{splits} {tile_name(tile)}",
            partial(prepare, tile), lambda run: relative(run(0), run.want()),
            heads * RANK * VALUE * 2.0,
        )  # fmt: skip


def latent_whole(batch: int, context: int, heads: int) -> Case:
    """All of a layer between the first projection and the last: three launches."""
    contexts = [context] * batch
    weights = heads * RANK * (NOPE + VALUE) * 2.0
    nbytes = decode_bytes(contexts) + weights
    return Case(
        f"latent_attention_decode b{batch} ctx{context} h{heads}",
        partial(prepare_whole, contexts, heads, copies_for(nbytes)), check_whole, nbytes,
    )  # fmt: skip


def latent_checks() -> Iterator[Case]:
    """Yield checks without times: edges, head counts, block sizes, rope forms and filters."""
    for heads in (1, 5, 16, 20, 128):
        for block_size in (16, 64, 128):
            yield Case(
                f"check decode h{heads} block{block_size}",
                partial(prepare_whole, list(EDGES), heads, 1, block_size, heads % 2 == 0),
                check_whole, timed=False,
            )  # fmt: skip
    for name in ("retained", "mask", "experts", "all"):
        yield Case(
            f"check decode filter {name}",
            partial(prepare_whole, list(EDGES), 16, 1, 64, True, name),
            check_whole, timed=False,
        )  # fmt: skip


def prepare_whole(
    contexts: list[int],
    heads: int,
    copies: int,
    block_size: int = BLOCK_SIZE,
    interleaved: bool = True,
    filter_name: str = "",
) -> Callable[[int], torch.Tensor]:
    """Return run(i); run.want(i) is its reference, run.pools the pools that they wrote."""
    batch = len(contexts)
    cache = make_cache(contexts, WIDTH, copies, block_size)
    width = heads * (NOPE + ROPE)
    q, kv_a = randn(batch, width + WIDTH).split((width, WIDTH), dim=1)
    norm = randn(RANK)
    w_uk = [randn(heads, NOPE, RANK, scale=NOPE**-0.5) for _ in range(copies)]
    w_uv = [randn(heads, RANK, VALUE, scale=RANK**-0.5) for _ in range(copies)]
    angles = torch.rand(batch, ROPE // 2, device=DEVICE) * 100
    angles = angles.repeat_interleave(2, 1) if interleaved else angles.repeat(1, 2)
    keep = make_filter(filter_name, cache, heads)
    other_pool = cache.pool.clone() if copies == 1 else cache.pool

    def call(function: Callable[..., torch.Tensor], pool: torch.Tensor, i: int) -> torch.Tensor:
        i %= copies
        return function(
            q, kv_a, norm, 1e-6, w_uk[i], w_uv[i], angles.cos(), angles.sin(),
            pool, cache.slots[i], cache.tables[i], cache.lens,
            scale=SCALE, interleaved=interleaved, key_filter=keep,
        )  # fmt: skip

    cos, sin = angles.cos(), angles.sin()

    def run(i: int) -> torch.Tensor:
        i %= copies
        return latent_attention_decode(
            q, kv_a, norm, 1e-6, w_uk[i], w_uv[i], cos, sin,
            cache.pool, cache.slots[i], cache.tables[i], cache.lens,
            scale=SCALE, interleaved=interleaved, key_filter=keep,
        )  # fmt: skip

    run.want = partial(call, latent_attention_decode_reference, other_pool)
    run.pools = (cache.pool, other_pool)
    return run


def check_whole(run: Any) -> float:
    """Compare results and written pools; what was NaN must still be."""
    got, want = run(0), run.want(0)
    written, expected = run.pools
    if not torch.equal(written.isnan(), expected.isnan()):
        return float("inf")
    pools = relative(written.nan_to_num(), expected.nan_to_num())
    return max(relative(got, want), pools)


def make_filter(name: str, cache: Cache, heads: int) -> KeyFilter:
    """Return the filter of that name with random contents."""
    batch, blocks = cache.tables.shape[1:]

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.int32, device=DEVICE)

    keep = KeyFilter()
    if name in ("retained", "all"):
        keep = replace(keep, retained=ints(0, 400, heads), sink=4)
    if name in ("mask", "all"):
        keep = replace(keep, block_mask=ints(-(2**31), 2**31 - 1, batch, -(-blocks // 32)))
    if name in ("experts", "all"):
        experts = ints(0, 3, *cache.pool.shape[:2])
        keep = replace(keep, key_experts=experts, query_experts=ints(0, 3, batch))
    return keep


def latent_parts(batch: int, context: int, heads: int) -> Iterator[Case]:
    """Yield the three launches of `latent_whole` apart."""
    contexts = [context] * batch
    nbytes = decode_bytes(contexts)
    up, down = (heads * RANK * width * 2.0 for width in (NOPE, VALUE))

    def prepare(part: str) -> Callable[[int], Any]:
        copies = copies_for(nbytes)
        cache = make_cache(contexts, WIDTH, copies)
        q, kv_a = randn(batch, heads * 192), randn(batch, WIDTH)
        norm, query = randn(RANK), randn(batch, heads, WIDTH)
        w_uk = [randn(heads, NOPE, RANK) for _ in range(copies)]
        w_uv = [randn(heads, RANK, VALUE) for _ in range(copies)]
        cos, sin = torch.rand(2, batch, ROPE, device=DEVICE)
        decode = partial(paged_decode, scale=SCALE, groups=1, value_dim=RANK)
        partials = [decode(query, cache.pool, None, table, cache.lens) for table in cache.tables]
        return {
            "query": lambda i: latent_query(
                q, kv_a, norm, 1e-6, w_uk[i % copies], cos, sin, cache.pool,
                cache.slots[i % copies], interleaved=True,
            ),
            "splits": lambda i: decode(
                query, cache.pool, None, cache.tables[i % copies], cache.lens
            ),
            "combine": lambda i: combine_project(partials[i % copies], w_uv[i % copies]),
        }[part]  # fmt: skip

    for part, its_bytes in (("query", up), ("splits", nbytes), ("combine", down)):
        name = f"  {part} b{batch} ctx{context} h{heads}"
        yield Case(name, partial(prepare, part), lambda run: 0.0, its_bytes)
    yield latent_bare(batch, context, heads)


def grouped(batch: int, context: int, heads: int = 32, groups: int = 8, dim: int = 128) -> Case:
    """Llama 3's shape: append and attention."""
    nbytes = batch * context * groups * dim * 4.0

    def prepare() -> Callable[[int], torch.Tensor]:
        caches = [make_cache([context] * batch, groups * dim, copies_for(nbytes)) for _ in "kv"]
        k_cache, v_cache = caches
        v_cache = replace(v_cache, tables=k_cache.tables)
        v_cache.pool.copy_(randn(*v_cache.pool.shape))
        parts = randn(batch, heads + 2 * groups, dim).split((heads, groups, groups), dim=1)
        angles = torch.rand(batch, dim // 2, device=DEVICE).repeat(1, 2) * 100
        cos, sin = angles.cos(), angles.sin()

        def call(append: Any, decode: Any, i: int) -> torch.Tensor:
            i %= len(k_cache.tables)
            pools = (k_cache.pool, v_cache.pool)
            turned, _ = append(*parts, cos, sin, *pools, k_cache.slots[i], interleaved=False)
            return decode(turned, *pools, k_cache.tables[i], k_cache.lens, scale=dim**-0.5)

        run = partial(call, append_grouped_query, grouped_query_decode)
        run.want = partial(call, append_grouped_query_reference, grouped_query_decode_reference)
        return run

    return Case(
        f"grouped_query b{batch} ctx{context} h{heads}/{groups}",
        prepare, lambda run: relative(run(0), run.want(0)), nbytes,
    )  # fmt: skip
