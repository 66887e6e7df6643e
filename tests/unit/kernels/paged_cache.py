"""Paged pools for kernel tests: blocks in random order, NaN wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

RNG = torch.Generator().manual_seed(20)


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=RNG) * scale).to(dtype)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return ‖got − want‖ / ‖want‖; infinite when anything is not finite."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got.double() - want.double()).norm() / want.double().norm())


def angles(tokens: int, width: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [tokens, width] with each pair's angle twice."""
    half = torch.rand(tokens, width // 2, generator=RNG) * 50
    each = half.repeat_interleave(2, 1) if interleaved else half.repeat(1, 2)
    return each.cos(), each.sin()


@dataclass
class PagedCache:
    """Pools [N, block_size, width] of the same blocks, and the rows that use them."""

    pools: list[torch.Tensor]
    block_tables: torch.Tensor  # [B, M] int32
    context_lens: torch.Tensor  # [B] int32
    row_slots: list[torch.Tensor]  # slots of each row's keys, in order

    @property
    def last_slots(self) -> torch.Tensor:
        """Slot of each row's last key; −1 for a row without keys."""
        return torch.tensor([int(s[-1]) if len(s) else -1 for s in self.row_slots]).int()

    def keys(self, row: int, pool: int = 0) -> torch.Tensor:
        """A row's cached rows [length, width] in order."""
        flat = self.pools[pool].view(-1, self.pools[pool].shape[-1])
        return flat[self.row_slots[row]]


def paged_cache(
    contexts: list[int],
    width: int,
    block_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    pools: int = 1,
) -> PagedCache:
    """Return a cache whose keys are random and whose other rows are NaN."""
    blocks = max(1, -(-max(contexts) // block_size))
    count = len(contexts) * blocks + 2
    tables = torch.randperm(count, generator=RNG)[: count - 2].view(len(contexts), blocks)
    slots = []
    for row, length in enumerate(contexts):
        at = torch.arange(length)
        slots.append(tables[row][at // block_size] * block_size + at % block_size)
    filled = torch.cat(slots)
    all_pools = []
    for _ in range(pools):
        pool = torch.full((count, block_size, width), torch.nan, dtype=dtype)
        pool.view(-1, width)[filled] = randn(len(filled), width, dtype=dtype)
        all_pools.append(pool)
    lens = torch.tensor(contexts, dtype=torch.int32)
    return PagedCache(all_pools, tables.int(), lens, slots)
