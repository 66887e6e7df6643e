"""Causal attention of ragged prompts on Hopper, its warps each with a task of their own.

The same results as `prefill_attention`, in Gluon, Triton's lower level, in the order of
FlashAttention-3 (arXiv 2407.08608): one warp has keys and values copied by the tensor memory unit,
two groups of four warps own 64 queries each, and the softmax of a tile runs while the tensor cores
multiply the next keys and the last values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deepseek_triton.kernels.paged_decode import LOG2_E

HALF = 64  # queries of four warps: what the tensor cores take at once
_HOPPER = (9, 0)
_ALIGNMENT = 16  # bytes between rows that the tensor memory unit takes
_HEADS_TOGETHER = 16  # so few that programs of the same head meet in the L2 cache
_SHORT = 256  # new tokens and, on average, keys of rows for which small tiles are faster
_REGISTERS = 168  # of a thread on average: 12 warps fill a multiprocessor


@dataclass(frozen=True)
class HopperTile:
    """Keys of a program's step, and how many tiles of keys and of values it has in flight."""

    block_n: int = 128
    stages: int = 2


def fits(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_rope: torch.Tensor | None = None
) -> bool:
    """Whether this kernel takes the arguments of `prefill_attention`."""
    dim, rope = k.shape[2], q.shape[2] - k.shape[2]
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device) == _HOPPER
        and q.dtype in (torch.bfloat16, torch.float16)
        and dim == v.shape[2]
        and dim in (64, 128)
        and rope in (0, 16, 32, 64)
        and all(_copyable(x) for x in (q, k, v, k_rope) if x is not None)
    )


def _copyable(x: torch.Tensor) -> bool:
    """Whether the tensor memory unit reads `x`."""
    steps = (x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1]))
    return x.numel() > 0 and x.stride(-1) == 1 and all(step % _ALIGNMENT == 0 for step in steps)


def prefill_attention_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *,
    max_q: int,
    scale: float,
    k_rope: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: HopperTile | None = None,
) -> torch.Tensor:
    """Return what `prefill_attention` does, of what `fits`."""
    tokens, heads, width = q.shape
    dim = k.shape[2]
    rope = width - dim
    if out is None:
        out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    if tile is None:
        short = max_q <= _SHORT and len(k) <= _SHORT * (len(cu_q) - 1)
        tile = HopperTile(64, 4) if short else HopperTile()
    q_map = _descriptor(q[..., :dim].transpose(0, 1), [1, HALF, dim])
    k_map = _descriptor(k.transpose(0, 1), [1, tile.block_n, dim])
    v_map = _descriptor(v.transpose(0, 1), [1, tile.block_n, dim])
    q_rope_map, k_rope_map = q_map, k_map  # unused without a shared part
    if k_rope is not None:
        q_rope_map = _descriptor(q[..., dim:].transpose(0, 1), [1, HALF, rope])
        k_rope_map = _descriptor(k_rope[None], [1, tile.block_n, rope])
    together = max(n for n in range(1, _HEADS_TOGETHER + 1) if heads % n == 0)
    grid = (together, triton.cdiv(max_q, 2 * HALF), (len(cu_q) - 1) * (heads // together))
    _prefill_attention_hopper[grid](
        q_map, q_rope_map, k_map, k_rope_map, v_map, out, cu_q, cu_k, scale * LOG2_E,
        out.stride(0), out.stride(1),
        HEADS=heads, SHARING=heads // k.shape[1], DIM=dim, ROPE=rope, N=tile.block_n,
        STAGES=tile.stages, num_warps=4, maxnreg=_REGISTERS,
    )  # fmt: skip
    return out


def _descriptor(x: torch.Tensor, block: list[int]) -> Any:
    """Describe `x` to the tensor memory unit."""
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor.from_tensor(
        x, block, gl.NVMMASharedLayout.get_default_for(block, dtype)
    )


@gluon.constexpr_function
def _product_layout(width: int) -> Any:
    """Products [64, width] of four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.constexpr_function
def _row_layout(width: int) -> Any:
    """Rows of `width` 2-byte numbers in pieces of 16 bytes, for four warps."""
    lanes = width // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def _copy_tile(tensor_map, head, row, ready, target):
    """Send for rows from `row` on of a head; `ready` gets their bytes."""
    rank3: gl.constexpr = [1, target.shape[0], target.shape[1]]
    tma.async_copy_global_to_shared(tensor_map, [head, row, 0], ready, target.reshape(rank3))


@gluon.jit
def _copy_keys(
    k_map, k_rope_map, keys, ropes, ready, free, i, head, row,
    DIM: gl.constexpr, ROPE: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Send for the i-th tile of keys as soon as its place is free."""
    place = i % STAGES
    mbarrier.wait(free.index(place), (i // STAGES & 1) ^ 1)
    mbarrier.expect(ready.index(place), N * (DIM + ROPE) * 2)
    _copy_tile(k_map, head, row, ready.index(place), keys.index(place))
    if ROPE > 0:
        _copy_tile(k_rope_map, 0, row, ready.index(place), ropes.index(place))


@gluon.jit
def _copy_all(
    maps, buffers, barriers, q_begin, k_begin, tiles, head,
    SHARING: gl.constexpr, DIM: gl.constexpr, ROPE: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Send for the queries, then for keys and values in the order in which they are used."""
    q_map, q_rope_map, k_map, k_rope_map, v_map = maps
    q, q_rope, keys, ropes, values = buffers
    q_ready, k_ready, k_free, v_ready, v_free = barriers
    mbarrier.expect(q_ready, 2 * 64 * (DIM + ROPE) * 2)
    for half in gl.static_range(2):
        _copy_tile(q_map, head, q_begin + half * 64, q_ready, q.index(half))
        if ROPE > 0:
            _copy_tile(q_rope_map, head, q_begin + half * 64, q_ready, q_rope.index(half))
    group = head // SHARING
    row = k_begin + (tiles - 1) * N
    _copy_keys(k_map, k_rope_map, keys, ropes, k_ready, k_free, 0, group, row, DIM, ROPE, N, STAGES)
    for i in range(tiles):
        if i + 1 < tiles:
            _copy_keys(
                k_map, k_rope_map, keys, ropes, k_ready, k_free, i + 1, group, row - N,
                DIM, ROPE, N, STAGES,
            )  # fmt: skip
        place = i % STAGES
        mbarrier.wait(v_free.index(place), (i // STAGES & 1) ^ 1)
        mbarrier.expect(v_ready.index(place), N * DIM * 2)
        _copy_tile(v_map, group, row, v_ready.index(place), values.index(place))
        row -= N


@gluon.jit
def _await(ready, i, STAGES: gl.constexpr, pred=True):
    """Wait until the i-th tile is there."""
    mbarrier.wait(ready.index(i % STAGES), i // STAGES & 1, pred=pred)


@gluon.jit
def _multiply_keys(q, q_rope, keys, ropes, i, ROPE: gl.constexpr, STAGES: gl.constexpr):
    """Start the product of the queries with the i-th tile of keys."""
    N: gl.constexpr = keys.shape[1]
    place = i % STAGES
    scores = gl.zeros([64, N], gl.float32, _product_layout(N))
    k = keys.index(place).permute((1, 0))
    scores = warpgroup_mma(q, k, scores, use_acc=False, is_async=True)
    if ROPE > 0:
        k_rope = ropes.index(place).permute((1, 0))
        scores = warpgroup_mma(q_rope, k_rope, scores, is_async=True)
    return scores


@gluon.jit
def _softmax(scores, position, start, top, total, scale, MASKED: gl.constexpr):
    """Return the weights of a tile's keys, the new maximum and sum, and what old values become."""
    MMA: gl.constexpr = scores.type.layout
    if MASKED:
        n = start + gl.arange(0, scores.shape[1], gl.SliceLayout(0, MMA))
        scores = gl.where(n[None, :] <= position[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, axis=1) * scale)
    base = new_top
    if MASKED:  # a row may not have seen any key yet
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    decay = gl.exp2(top - base)
    weights = gl.exp2(scores * scale - base[:, None])
    return weights, new_top, total * decay + gl.sum(weights, axis=1), decay


@gluon.jit
def _as_operand(weights, dtype: gl.constexpr, MMA: gl.constexpr):
    """The weights as the left side of the product with the values."""
    return gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, MMA, 2))


@gluon.jit
def _attend(
    buffers, barriers, q, q_rope, weights, acc, decay, top, total, position, scale,
    begin, end, tiles,
    ROPE: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Take the tiles begin … end in; `weights` are those of the tile before, still to be used."""
    _, _, keys, ropes, values = buffers
    _, k_ready, k_free, v_ready, v_free = barriers
    OUT: gl.constexpr = acc.type.layout
    for i in range(begin, end):
        scores = _multiply_keys(q, q_rope, keys, ropes, i, ROPE, STAGES)
        _await(v_ready, i - 1, STAGES)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, OUT))[:, None]
        acc = warpgroup_mma(weights, values.index((i - 1) % STAGES), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_free.index(i % STAGES), count=1)
        start = (tiles - 1 - i) * N
        exact, top, total, decay = _softmax(scores, position, start, top, total, scale, MASKED)
        new_weights = _as_operand(exact, keys.dtype, OUT)
        # The wait for keys is a border that the compiler moves neither the softmax nor the wait
        # for the tensor cores across: so it runs while they work.
        _await(k_ready, i + 1, STAGES, i + 1 < tiles)
        acc, weights, new_weights, top, total, decay = warpgroup_mma_wait(
            0, deps=[acc, weights, new_weights, top, total, decay]
        )
        mbarrier.arrive(v_free.index((i - 1) % STAGES), count=1)
        weights = new_weights
    return weights, acc, decay, top, total


@gluon.jit
def _clear_after(values, count, DIM: gl.constexpr, N: gl.constexpr):
    """Zero the rows from `count` on: another row's values may be infinite."""
    layout: gl.constexpr = _row_layout(DIM)
    n = gl.arange(0, N, gl.SliceLayout(1, layout))[:, None]
    v = values.load(layout)
    values.store(gl.where(n < count, v, gl.zeros_like(v)))
    fence_async_shared()


@gluon.jit
def _store(out_ptr, result, count, out_token, buffer, DIM: gl.constexpr):
    """Store the first `count` rows of a half's result, by way of `buffer` [64, DIM]."""
    layout: gl.constexpr = _row_layout(DIM)
    buffer.store(result.to(buffer.dtype))
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, DIM, gl.SliceLayout(0, layout))[None, :]
    gl.store(out_ptr + row * out_token + column, buffer.load(layout), mask=row < count)


@gluon.jit
def _own_half(
    buffers, barriers, out_ptr, out_token, scale, first, queries, keys_seen, tiles, open_tiles,
    half: gl.constexpr,
    DIM: gl.constexpr, ROPE: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute and store 64 queries' results, from the tile with the last key down."""
    q_both, q_rope_both, keys, ropes, values = buffers
    q_ready, k_ready, k_free, v_ready, v_free = barriers
    MMA: gl.constexpr = _product_layout(N)
    OUT: gl.constexpr = _product_layout(DIM)
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    q, q_rope = q_both.index(half), q_rope_both.index(half)
    first += half * 64
    position = first + keys_seen - queries + gl.arange(0, 64, ROWS)
    top = gl.full([64], float("-inf"), gl.float32, ROWS)
    total = gl.zeros([64], gl.float32, ROWS)
    acc = gl.zeros([64, DIM], gl.float32, OUT)

    mbarrier.wait(q_ready, 0)
    _await(k_ready, 0, STAGES)
    scores = _multiply_keys(q, q_rope, keys, ropes, 0, ROPE, STAGES)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_free.index(0), count=1)
    start = (tiles - 1) * N
    exact, top, total, decay = _softmax(scores, position, start, top, total, scale, True)
    weights = _as_operand(exact, keys.dtype, OUT)
    if start + N > keys_seen:
        _await(v_ready, 0, STAGES)
        _clear_after(values.index(0), keys_seen - start, DIM, N)
    _await(k_ready, 1, STAGES, tiles > 1)
    masked = gl.maximum(tiles - open_tiles, 1)
    weights, acc, decay, top, total = _attend(
        buffers, barriers, q, q_rope, weights, acc, decay, top, total, position, scale,
        1, masked, tiles, ROPE, N, STAGES, True,
    )  # fmt: skip
    weights, acc, decay, top, total = _attend(
        buffers, barriers, q, q_rope, weights, acc, decay, top, total, position, scale,
        masked, tiles, tiles, ROPE, N, STAGES, False,
    )  # fmt: skip
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, OUT))[:, None]
    _await(v_ready, tiles - 1, STAGES)
    acc = warpgroup_mma(weights, values.index((tiles - 1) % STAGES), acc, is_async=True)
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    result = acc / gl.convert_layout(total, gl.SliceLayout(1, OUT))[:, None]
    _store(out_ptr + half * 64 * out_token, result, queries - first, out_token, q, DIM)


@gluon.jit
def _allocate(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Shared memory of COUNT tiles."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
    return gl.allocate_shared_memory(dtype, [COUNT, ROWS, WIDTH], layout)


@gluon.jit
def _make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each of which turns after ARRIVALS."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit(do_not_specialize=["scale"])
def _prefill_attention_hopper(
    q_map, q_rope_map, k_map, k_rope_map, v_map, out_ptr, cu_q_ptr, cu_k_ptr,
    scale, out_token, out_head,
    HEADS: gl.constexpr, SHARING: gl.constexpr, DIM: gl.constexpr, ROPE: gl.constexpr,
    N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A program owns 128 queries of a head and row; those with the most keys come first."""
    together = gl.num_programs(0)
    head = gl.program_id(2) % (HEADS // together) * together + gl.program_id(0)
    row = gl.program_id(2) // (HEADS // together)
    q_begin, k_begin = gl.load(cu_q_ptr + row), gl.load(cu_k_ptr + row)
    queries = gl.load(cu_q_ptr + row + 1) - q_begin
    keys_seen = gl.load(cu_k_ptr + row + 1) - k_begin
    first = (gl.num_programs(1) - 1 - gl.program_id(1)) * 128
    if first >= queries:
        return
    # All queries look at the keys up to the first one's; those after it need a mask.
    offset = keys_seen - queries
    open_tiles = (first + offset + 1) // N
    tiles = gl.cdiv(gl.minimum(first + 128 + offset, keys_seen), N)

    dtype: gl.constexpr = q_map.dtype
    SHARED: gl.constexpr = ROPE if ROPE > 0 else 16
    buffers = (
        _allocate(dtype, 2, 64, DIM), _allocate(dtype, 2, 64, SHARED),
        _allocate(dtype, STAGES, N, DIM), _allocate(dtype, STAGES, N, SHARED),
        _allocate(dtype, STAGES, N, DIM),
    )  # fmt: skip
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    barriers = (
        q_ready, _make_barriers(STAGES, 1), _make_barriers(STAGES, 2),
        _make_barriers(STAGES, 1), _make_barriers(STAGES, 2),
    )  # fmt: skip
    fence_async_shared()
    maps = (q_map, q_rope_map, k_map, k_rope_map, v_map)
    out_ptr += (q_begin + first).to(gl.int64) * out_token + head * out_head
    gl.warp_specialize(
        [
            (_own_half, (
                buffers, barriers, out_ptr, out_token, scale, first, queries, keys_seen, tiles,
                open_tiles, 0, DIM, ROPE, N, STAGES,
            )),
            (_own_half, (
                buffers, barriers, out_ptr, out_token, scale, first, queries, keys_seen, tiles,
                open_tiles, 1, DIM, ROPE, N, STAGES,
            )),
            (_copy_all, (
                maps, buffers, barriers, q_begin + first, k_begin, tiles, head,
                SHARING, DIM, ROPE, N, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
