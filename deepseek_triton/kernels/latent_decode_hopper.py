"""The latent attention of a decode step on Hopper, with its copies laid out by hand.

The same algorithm and results as `paged_decode` without a filter, in Gluon, Triton's lower level.
Triton's own pipeline sends for a tile of keys only after the products with the one before; here it
travels during them, from shared memory's second half. Tiles without the new token's key set out
before the kernel's turn comes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepseek_triton.kernels.launch import dependent_launch
from deepseek_triton.kernels.paged_decode import LOG2_E, PROGRAMS, Partials, choose_splits

KEYS = 64  # of a tile: what the tensor cores take at once
_HOPPER = (9, 0)


def fits(q: torch.Tensor, pool: torch.Tensor, rank: int) -> bool:
    """Whether this kernel takes the arguments of `latent_splits`."""
    rope = q.shape[2] - rank
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device) == _HOPPER
        and q.dtype in (torch.bfloat16, torch.float16)
        and rank == triton.next_power_of_2(rank)
        and 64 <= rank <= 512
        and rope in (16, 32, 64)
        and pool.shape[1] % KEYS == 0
    )


def latent_splits(
    q: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    rank: int,
    splits: int | None = None,
    block_h: int | None = None,
) -> Partials:
    """Return what `paged_decode` does, its value_dim being rank.

    Keys older than the step's are read early: what runs just before may write each row's last.
    """
    batch, heads, width = q.shape
    capacity = block_tables.shape[1] * pool.shape[1]
    block_h = block_h or _heads_at_once(batch, heads)
    head_blocks = triton.cdiv(heads, block_h)
    splits = splits or choose_splits(batch * head_blocks, capacity)
    values = torch.empty(batch, splits, heads, rank, dtype=q.dtype, device=q.device)
    lse = None
    if splits > 1:
        lse = torch.empty(batch, splits, heads, dtype=torch.float32, device=q.device)
    _latent_splits[(splits, head_blocks, batch)](
        q, pool, block_tables, context_lens, values, lse, scale * LOG2_E,
        q.stride(0), q.stride(1), block_tables.stride(0),
        HEADS=heads, DIM=rank, ROPE=width - rank, BLOCK_SIZE=pool.shape[1], BLOCK_H=block_h,
        num_warps=8 if block_h == 64 else 4, **dependent_launch(q),
    )  # fmt: skip
    return Partials(values, lse)


def _heads_at_once(batch: int, heads: int) -> int:
    """Choose the heads of a program: more read the keys less often, fewer fill the card."""
    most = 64 if batch * triton.cdiv(heads, 32) > PROGRAMS else 32
    return min(most, max(16, int(triton.next_power_of_2(heads))))


@gluon.constexpr_function
def _copy_layout(width: int, warps: int) -> Any:
    """Rows of `width` 2-byte numbers in pieces of 16 bytes."""
    lanes = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def _product_layout(heads: int, warps: int) -> Any:
    """Products [N, heads]: groups of four warps share the heads, for N is one instruction's."""
    groups = warps // 4
    return gl.NVMMADistributedLayout([3, 0], [4, groups], [16, heads // groups, 16])


@gluon.jit
def _await_inputs(PDL: gl.constexpr):
    """As launch.await_inputs, in this language."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _copy_rows(target, row_ptr, stride, count, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Send for ROWS rows of WIDTH numbers; those from `count` on become zeros."""
    layout: gl.constexpr = _copy_layout(WIDTH, gl.num_warps())
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    mask = (row < count) & (column < WIDTH)
    async_copy.async_copy_global_to_shared(target, row_ptr + row * stride + column, mask=mask)


@gluon.jit
def _copy_keys(
    keys, ropes, pool_ptr, block, tile, length, wanted,
    DIM: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Send for a tile of keys in `block` if it is wanted, as one group, which may be empty."""
    if wanted:
        start = tile * N
        rows = pool_ptr + (block.to(gl.int64) * BLOCK_SIZE + start % BLOCK_SIZE) * (DIM + ROPE)
        _copy_rows(keys.index(tile % 2), rows, DIM + ROPE, length - start, N, DIM)
        _copy_rows(ropes.index(tile % 2), rows + DIM, DIM + ROPE, length - start, N, ROPE)
    async_copy.commit_group()


@gluon.jit
def _attend(
    keys, ropes, q, q_rope, weights_buffer, key, length, top, total, acc, scale,
    MMA: gl.constexpr, N: gl.constexpr, BLOCK_H: gl.constexpr,
):  # fmt: skip
    """Take one tile into the running maximum [H], the sums [N, H] and the values [DIM, H]."""
    scores = gl.zeros([N, BLOCK_H], gl.float32, MMA)
    scores = warpgroup_mma(keys, q, scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(ropes, q_rope, scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    scores = gl.where((key < length)[:, None], scores * scale, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, axis=0))
    decay = gl.exp2(top - new_top)[None, :]
    weights = gl.exp2(scores - new_top[None, :])
    weights_buffer.store(weights.to(keys.dtype))
    fence_async_shared()
    acc = warpgroup_mma(keys.permute((1, 0)), weights_buffer, acc * decay)
    return new_top, total * decay + weights, acc


@gluon.jit
def _store_split(
    values_ptr, lse_ptr, result, first_head, top, total, acc, has_keys,
    HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_H: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Finish a split: divide acc [DIM, H] by its sum, and store it with its lse."""
    dtype: gl.constexpr = values_ptr.dtype.element_ty
    whole = gl.sum(total, axis=0)
    head = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(0, MMA))
    if lse_ptr is not None:
        lse = gl.where(whole == 0, float("-inf"), top + gl.log2(gl.maximum(whole, 1e-37)))
        gl.store(lse_ptr + result + head, lse, mask=head < HEADS)
    if has_keys | (lse_ptr is None):  # nothing reads the values of a split without keys
        layout: gl.constexpr = _copy_layout(DIM, gl.num_warps())
        out = (acc / gl.where(whole == 0, 1.0, whole)[None, :]).to(dtype)
        out = gl.convert_layout(gl.permute(out, (1, 0)), layout)
        h = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, layout))[:, None]
        d = gl.arange(0, DIM, gl.SliceLayout(0, layout))[None, :]
        gl.store(values_ptr + (result + h) * DIM + d, out, mask=(h < HEADS) & (d < DIM))


@gluon.jit(do_not_specialize=["scale"])
def _latent_splits(
    q_ptr, pool_ptr, tables_ptr, lens_ptr, values_ptr, lse_ptr,
    scale, q_row, q_head, table_row,
    HEADS: gl.constexpr, DIM: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_H: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (s, i, b) owns split s of row b for the i-th BLOCK_H heads."""
    N: gl.constexpr = 64
    MMA: gl.constexpr = _product_layout(BLOCK_H, gl.num_warps())
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    row, split, splits = gl.program_id(2), gl.program_id(0), gl.num_programs(0)
    first_head = gl.program_id(1) * BLOCK_H
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, DIM], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, ROPE], dtype)
    keys = gl.allocate_shared_memory(dtype, [2, N, DIM], wide)
    ropes = gl.allocate_shared_memory(dtype, [2, N, ROPE], narrow)
    q = gl.allocate_shared_memory(dtype, [BLOCK_H, DIM], wide)
    q_rope = gl.allocate_shared_memory(dtype, [BLOCK_H, ROPE], narrow)
    weights = gl.allocate_shared_memory(
        dtype, [N, BLOCK_H], gl.NVMMASharedLayout.get_default_for([N, BLOCK_H], dtype)
    )

    length = gl.load(lens_ptr + row)
    tiles = gl.cdiv(length, N)
    first = gl.cdiv(tiles * split, splits)
    last = gl.cdiv(tiles * (split + 1), splits)
    table = tables_ptr + row.to(gl.int64) * table_row
    block = gl.load(table + first * N // BLOCK_SIZE, mask=first < last, other=0)
    # The first tile sets out early if all of it is older than this step.
    early = (first < last) & ((first + 1) * N < length)
    late = (first < last) & (early == 0)
    _copy_keys(keys, ropes, pool_ptr, block, first, length, early, DIM, ROPE, BLOCK_SIZE, N)
    _await_inputs(PDL)
    q_rows = q_ptr + row.to(gl.int64) * q_row + first_head * q_head
    _copy_rows(q, q_rows, q_head, HEADS - first_head, BLOCK_H, DIM)
    _copy_rows(q_rope, q_rows + DIM, q_head, HEADS - first_head, BLOCK_H, ROPE)
    _copy_keys(keys, ropes, pool_ptr, block, first, length, late, DIM, ROPE, BLOCK_SIZE, N)
    block = gl.load(table + (first + 1) * N // BLOCK_SIZE, mask=first + 1 < last, other=0)

    top = gl.full([BLOCK_H], float("-inf"), gl.float32, gl.SliceLayout(0, MMA))
    total = gl.zeros([N, BLOCK_H], gl.float32, MMA)  # added up over keys once, after the loop
    acc = gl.zeros([DIM, BLOCK_H], gl.float32, MMA)
    place = gl.arange(0, N, gl.SliceLayout(1, MMA))
    for tile in range(first, last):
        _copy_keys(
            keys, ropes, pool_ptr, block, tile + 1, length, tile + 1 < last,
            DIM, ROPE, BLOCK_SIZE, N,
        )  # fmt: skip
        block = gl.load(table + (tile + 2) * N // BLOCK_SIZE, mask=tile + 2 < last, other=0)
        async_copy.wait_group(1)
        fence_async_shared()
        top, total, acc = _attend(
            keys.index(tile % 2), ropes.index(tile % 2), q.permute((1, 0)), q_rope.permute((1, 0)),
            weights, tile * N + place, length, top, total, acc, scale, MMA, N, BLOCK_H,
        )  # fmt: skip

    _store_split(
        values_ptr, lse_ptr, (row.to(gl.int64) * splits + split) * HEADS, first_head, top, total,
        acc, first < last, HEADS, DIM, BLOCK_H, MMA,
    )  # fmt: skip
