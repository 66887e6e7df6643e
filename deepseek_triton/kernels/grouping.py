"""Tokens sorted by expert, for grouped products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.launch import await_inputs, dependent_launch

_FEW_TOKENS = 64  # up to here one launch sorts
_CHUNK = 64  # pairs that one program handles beyond
_OWN = tl.constexpr(16)  # experts that a program of the one launch places


@dataclass(frozen=True)
class Groups:
    """Pairs (token, choice) sorted by expert; each expert starts a new block of `block_rows`."""

    pairs: torch.Tensor  # [max_blocks · block_rows] int32: token · K + choice; −1 = padding
    block_experts: torch.Tensor  # [max_blocks] int32; −1 = no block
    block_rows: int


def group_pairs(ids: torch.Tensor, num_experts: int, block_rows: int) -> Groups:
    """Sort the pairs of ids [T, K] int32 by expert, in the order of tokens; ids are < num_experts.

    No read by the host: sizes are upper bounds of T, K and `num_experts`. One launch for few
    tokens, three for more.
    """
    tokens, count = len(ids), ids.numel()
    max_blocks = min(count, num_experts + count // block_rows)
    device = ids.device
    pairs = torch.empty(max_blocks * block_rows, dtype=torch.int32, device=device)
    block_experts = torch.empty(max_blocks, dtype=torch.int32, device=device)
    block_e = max(16, triton.next_power_of_2(num_experts))
    pdl = dependent_launch(ids)
    if tokens <= _FEW_TOKENS:
        _group_few[(triton.cdiv(num_experts, _OWN.value) + 1,)](
            ids, pairs, block_experts, tokens, num_experts, max_blocks,
            PAIRS=ids.shape[1], BLOCK_T=triton.next_power_of_2(tokens), BLOCK_E=block_e,
            BLOCK_P=triton.next_power_of_2(count), BLOCK_B=triton.next_power_of_2(max_blocks),
            BLOCK_ROWS=block_rows, **pdl,
        )  # fmt: skip
        return Groups(pairs, block_experts, block_rows)
    chunks = triton.cdiv(count, _CHUNK)
    counts = torch.empty(num_experts, chunks, dtype=torch.int32, device=device)
    totals = torch.empty(num_experts, dtype=torch.int32, device=device)
    sizes = {"CHUNK": _CHUNK, "BLOCK_E": block_e}
    fill = triton.cdiv(pairs.numel(), 1024)
    _count[(max(chunks, fill),)](
        ids, counts, pairs, count, chunks, num_experts, pairs.numel(), **sizes, **pdl
    )
    _scan[(num_experts,)](
        counts, totals, chunks, BLOCK=max(16, triton.next_power_of_2(chunks)), **pdl
    )
    _scatter[(chunks,)](
        ids, counts, totals, pairs, block_experts, count, chunks, num_experts, max_blocks,
        BLOCK_ROWS=block_rows, BLOCK_B=triton.next_power_of_2(max_blocks), **sizes, **pdl,
    )  # fmt: skip
    return Groups(pairs, block_experts, block_rows)


@triton.jit
def _load_chunk(ids_ptr, chunk, count, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return pair indices [CHUNK], their experts (−1 = none) and their one-hot rows."""
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids_ptr + pair, mask=pair < count, other=-1)
    hot = (expert[:, None] == tl.arange(0, BLOCK_E)[None, :]).to(tl.int32)
    return pair, expert, hot


@triton.jit(do_not_specialize=["count", "chunks", "slots"])
def _count(
    ids_ptr, counts_ptr, pairs_ptr, count, chunks, experts, slots,
    CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """counts[expert, chunk], and −1 in every slot of the result."""
    chunk = tl.program_id(0)
    await_inputs(PDL)
    slot = chunk * 1024 + tl.arange(0, 1024)
    tl.store(pairs_ptr + slot, tl.full([1024], -1, tl.int32), mask=slot < slots)
    if chunk < chunks:
        pair, expert, hot = _load_chunk(ids_ptr, chunk, count, CHUNK, BLOCK_E)
        e = tl.arange(0, BLOCK_E)
        tl.store(counts_ptr + e * chunks + chunk, tl.sum(hot, axis=0), mask=e < experts)


@triton.jit(do_not_specialize=["chunks"])
def _scan(counts_ptr, totals_ptr, chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One expert: its counts become the number of its pairs in earlier chunks."""
    expert = tl.program_id(0)
    chunk = tl.arange(0, BLOCK)
    await_inputs(PDL)
    at = counts_ptr + expert * chunks + chunk
    counts = tl.load(at, mask=chunk < chunks, other=0)
    tl.store(at, tl.cumsum(counts, axis=0) - counts, mask=chunk < chunks)
    tl.store(totals_ptr + expert, tl.sum(counts, axis=0))


@triton.jit(do_not_specialize=["count", "chunks", "max_blocks"])
def _scatter(
    ids_ptr, counts_ptr, totals_ptr, pairs_ptr, block_experts_ptr,
    count, chunks, experts, max_blocks,
    BLOCK_ROWS: tl.constexpr, BLOCK_B: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Put the pairs of a chunk where they belong; the first program also names each block."""
    chunk = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    await_inputs(PDL)
    blocks = tl.cdiv(tl.load(totals_ptr + e, mask=e < experts, other=0), BLOCK_ROWS)
    ends = tl.cumsum(blocks, axis=0)
    starts = (ends - blocks) * BLOCK_ROWS
    starts += tl.load(counts_ptr + e * chunks + chunk, mask=e < experts, other=0)
    pair, expert, hot = _load_chunk(ids_ptr, chunk, count, CHUNK, BLOCK_E)
    before = tl.cumsum(hot, axis=0) - 1
    slot = tl.sum(hot * (before + starts[None, :]), axis=1)
    tl.store(pairs_ptr + slot, pair, mask=expert >= 0)
    if chunk == 0:
        for first in range(0, BLOCK_B, 64):
            b = first + tl.arange(0, 64)
            owner = tl.sum((ends[None, :] <= b[:, None]).to(tl.int32), axis=1)
            owner = tl.where(b < tl.sum(blocks, axis=0), owner, -1)
            tl.store(block_experts_ptr + b, owner, mask=b < max_blocks)


@triton.jit
def _group_few(
    ids_ptr, pairs_ptr, block_experts_ptr, tokens, experts, max_blocks,
    PAIRS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The whole sort: each program counts all pairs and places those of its own experts.

    The last program has no experts; it marks the blocks that are left over.
    """
    e = tl.program_id(0) * _OWN + tl.arange(0, _OWN)
    t = tl.arange(0, BLOCK_T)
    every = tl.arange(0, BLOCK_E)
    index = tl.arange(0, BLOCK_P)
    await_inputs(PDL)
    there = index < tokens * PAIRS
    counts = tl.histogram(tl.load(ids_ptr + index, mask=there, other=0), BLOCK_E, mask=there)
    blocks = tl.cdiv(counts, BLOCK_ROWS)
    first = tl.sum(tl.where(every[None, :] < e[:, None], blocks[None, :], 0), axis=1)
    pair = tl.full([_OWN, BLOCK_T], -1, tl.int32)
    for p in tl.static_range(PAIRS):
        expert = tl.load(ids_ptr + t * PAIRS + p, mask=t < tokens, other=-1)
        pair = tl.where(expert[None, :] == e[:, None], (t * PAIRS + p)[None, :], pair)
    chosen = (pair >= 0).to(tl.int32)
    before = tl.cumsum(chosen, axis=1) - chosen
    count = tl.sum(chosen, axis=1)
    here = pairs_ptr + first[:, None] * BLOCK_ROWS
    tl.store(here + before, pair, mask=pair >= 0)
    for i in tl.static_range((BLOCK_T + BLOCK_ROWS - 1) // BLOCK_ROWS):
        tl.store(block_experts_ptr + first + i, e, mask=i * BLOCK_ROWS < count)
        slot = (i * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[None, :]
        padding = (slot >= count[:, None]) & (i * BLOCK_ROWS < count)[:, None]
        tl.store(here + slot, tl.full([_OWN, BLOCK_ROWS], -1, tl.int32), mask=padding)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        b = tl.arange(0, BLOCK_B)
        unused = (b >= tl.sum(blocks, axis=0)) & (b < max_blocks)
        tl.store(block_experts_ptr + b, tl.full([BLOCK_B], -1, tl.int32), mask=unused)
        slots = b[:, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
        minus = tl.full([BLOCK_B, BLOCK_ROWS], -1, tl.int32)
        tl.store(pairs_ptr + slots, minus, mask=unused[:, None])
