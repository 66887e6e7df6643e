"""Causal attention of ragged prompts on Hopper, its warps each with a task of their own.

The same results as `prefill_attention`, in Gluon, Triton's lower level, in the order of
FlashAttention-3 (arXiv 2407.08608): one warp has keys and values copied by the tensor memory unit,
two groups of four warps own 64 queries each, and the softmax of a tile runs while the tensor cores
multiply the next keys and the last values.
"""

from __future__ import annotations

import functools
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
_REGISTERS = 168  # of a thread on average: 12 warps fill a multiprocessor


@dataclass(frozen=True)
class HopperTile:
    """Keys of a program's step, and how many tiles of keys and of values it has in flight."""

    block_n: int = 128
    stages: int = 2
    late: bool = True  # old values are scaled after the next product of keys has started
    persistent: bool = True  # a program for a multiprocessor, for several items
    turns: bool = False  # the halves start their products in turns


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
        tile = HopperTile()
    q_map = _descriptor(q[..., :dim].transpose(0, 1), [1, HALF, dim])
    k_map = _descriptor(k.transpose(0, 1), [1, tile.block_n, dim])
    v_map = _descriptor(v.transpose(0, 1), [1, tile.block_n, dim])
    q_rope_map, k_rope_map = q_map, k_map  # unused without a shared part
    if k_rope is not None:
        q_rope_map = _descriptor(q[..., dim:].transpose(0, 1), [1, HALF, rope])
        k_rope_map = _descriptor(k_rope[None], [1, tile.block_n, rope])
    together = max(n for n in range(1, _HEADS_TOGETHER + 1) if heads % n == 0)
    blocks, rows = triton.cdiv(max_q, 2 * HALF), len(cu_q) - 1
    items = blocks * heads * rows
    # Rows of different lengths are left to the device's own scheduler, one item a program.
    programs = (
        min(items, _multiprocessors(q.device.index or 0))
        if rows == 1 and tile.persistent
        else items
    )
    _prefill_attention_hopper[(programs,)](
        q_map, q_rope_map, k_map, k_rope_map, v_map, out, cu_q, cu_k, scale * LOG2_E,
        out.stride(0), out.stride(1), items, blocks, heads // together,
        TOGETHER=together, SHARING=heads // k.shape[1], DIM=dim, ROPE=rope, N=tile.block_n,
        STAGES=tile.stages, LATE=tile.late, TURNS=tile.turns, num_warps=4, maxnreg=_REGISTERS,
    )  # fmt: skip
    return out


@functools.cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


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
def _find_item(turn, lengths, TOGETHER: gl.constexpr):
    """Return what this program's turn-th item is: head, first query, of a row that begins where.

    Items have fewer and fewer keys; every other turn runs backwards, so that all programs get the
    same number of keys. An item may be empty: then its first query is not among the row's.
    """
    cu_q_ptr, cu_k_ptr, items, blocks, sections = lengths
    programs, place = gl.num_programs(0), gl.program_id(0)
    item = turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)
    rest = item // TOGETHER
    block, rest = blocks - 1 - rest % blocks, rest // blocks
    head = rest % sections * TOGETHER + item % TOGETHER
    row = gl.minimum(rest // sections, items // (blocks * sections * TOGETHER) - 1)
    q_begin, k_begin = gl.load(cu_q_ptr + row), gl.load(cu_k_ptr + row)
    queries = gl.load(cu_q_ptr + row + 1) - q_begin
    seen = gl.load(cu_k_ptr + row + 1) - k_begin
    first = gl.where(item < items, block * 128, queries)
    return head, first, q_begin, queries, k_begin, seen


@gluon.jit
def _count_tiles(first, queries, seen, N: gl.constexpr):
    """Return the tiles of keys of 128 queries, and those of them that need no mask."""
    offset = seen - queries
    tiles = gl.cdiv(gl.minimum(first + 128 + offset, seen), N)
    return tiles, (first + offset + 1) // N


@gluon.jit
def _copy_tile(tensor_map, head, row, ready, target):
    """Send for rows from `row` on of a head; `ready` gets their bytes."""
    rank3: gl.constexpr = [1, target.shape[0], target.shape[1]]
    tma.async_copy_global_to_shared(tensor_map, [head, row, 0], ready, target.reshape(rank3))


@gluon.jit
def _copy_keys(
    maps, buffers, barriers, i, head, row,
    DIM: gl.constexpr, ROPE: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Send for the i-th tile of keys as soon as its place is free."""
    place = i % STAGES
    ready = barriers[2].index(place)
    mbarrier.wait(barriers[3].index(place), (i // STAGES & 1) ^ 1)
    mbarrier.expect(ready, N * (DIM + ROPE) * 2)
    _copy_tile(maps[2], head, row, ready, buffers[2].index(place))
    if ROPE > 0:
        _copy_tile(maps[3], 0, row, ready, buffers[3].index(place))


@gluon.jit
def _copy_queries(
    maps, buffers, barriers, count, head, row, DIM: gl.constexpr, ROPE: gl.constexpr
):  # fmt: skip
    """Send for the queries of the count-th item as soon as those before are used."""
    ready = barriers[0]
    mbarrier.wait(barriers[1], (count & 1) ^ 1)
    mbarrier.expect(ready, 2 * 64 * (DIM + ROPE) * 2)
    for half in gl.static_range(2):
        _copy_tile(maps[0], head, row + half * 64, ready, buffers[0].index(half))
        if ROPE > 0:
            _copy_tile(maps[1], head, row + half * 64, ready, buffers[1].index(half))


@gluon.jit
def _copy_all(
    maps, buffers, barriers, lengths, turns,
    TOGETHER: gl.constexpr, SHARING: gl.constexpr, DIM: gl.constexpr, ROPE: gl.constexpr,
    N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Send for the queries, keys and values of all items in the order in which they are used."""
    base, count = 0, 0  # tiles of keys and items before this one
    for turn in range(turns):
        head, first, q_begin, queries, k_begin, seen = _find_item(turn, lengths, TOGETHER)
        if first < queries:
            tiles, _ = _count_tiles(first, queries, seen, N)
            group = head // SHARING
            row = k_begin + (tiles - 1) * N
            _copy_keys(maps, buffers, barriers, base, group, row, DIM, ROPE, N, STAGES)
            _copy_queries(maps, buffers, barriers, count, head, q_begin + first, DIM, ROPE)
            for i in range(base, base + tiles):
                if i + 1 < base + tiles:
                    _copy_keys(maps, buffers, barriers, i + 1, group, row - N, DIM, ROPE, N, STAGES)
                place = i % STAGES
                ready = barriers[4].index(place)
                mbarrier.wait(barriers[5].index(place), (i // STAGES & 1) ^ 1)
                mbarrier.expect(ready, N * DIM * 2)
                _copy_tile(maps[4], group, row, ready, buffers[4].index(place))
                row -= N
            base += tiles
            count += 1


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
    begin, end, last, shift, half: gl.constexpr,
    ROPE: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, LATE: gl.constexpr,
    TURNS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Take the tiles begin … end of all, of which `last` ends the item.

    `weights` are those of the tile before, still to be used; `shift` makes turns of tiles.
    """
    _, _, keys, ropes, values = buffers
    _, _, k_ready, k_free, v_ready, v_free, turns = barriers
    OUT: gl.constexpr = acc.type.layout
    for i in range(begin, end):
        if TURNS:
            mbarrier.wait(turns.index(half), (i - shift + half) & 1)
        scores = _multiply_keys(q, q_rope, keys, ropes, i, ROPE, STAGES)
        _await(v_ready, i - 1, STAGES)
        if LATE:
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, OUT))[:, None]
        acc = warpgroup_mma(weights, values.index((i - 1) % STAGES), acc, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index(1 - half), count=1)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_free.index(i % STAGES), count=1)
        start = (last - 1 - i) * N
        exact, top, total, decay = _softmax(scores, position, start, top, total, scale, MASKED)
        new_weights = _as_operand(exact, keys.dtype, OUT)
        # The wait for keys is a border that the compiler moves neither the softmax nor the wait
        # for the tensor cores across: so it runs while they work.
        _await(k_ready, i + 1, STAGES, i + 1 < last)
        acc, weights, new_weights, top, total, decay = warpgroup_mma_wait(
            0, deps=[acc, weights, new_weights, top, total, decay]
        )
        mbarrier.arrive(v_free.index((i - 1) % STAGES), count=1)
        if not LATE:
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, OUT))[:, None]
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
def _store(out_ptr, result, row, count, out_token, DIM: gl.constexpr):
    """Store those of a half's 64 rows from `row` on that are less than count."""
    layout: gl.constexpr = result.type.layout
    row += gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, DIM, gl.SliceLayout(0, layout))[None, :]
    place = out_ptr + row.to(gl.int64) * out_token + column
    gl.store(place, result.to(out_ptr.dtype.element_ty), mask=row < count)


@gluon.jit
def _own_half(
    buffers, barriers, lengths, turns, out_ptr, out_token, out_head, scale, half: gl.constexpr,
    TOGETHER: gl.constexpr, DIM: gl.constexpr, ROPE: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, LATE: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Compute and store the results of 64 queries of every item."""
    base, count = 0, 0  # tiles of keys and items before this one
    for turn in range(turns):
        head, first, q_begin, queries, _, seen = _find_item(turn, lengths, TOGETHER)
        if first < queries:
            tiles, open_tiles = _count_tiles(first, queries, seen, N)
            first += half * 64
            result = _attend_all(
                buffers, barriers, base, count, tiles, open_tiles, first + seen - queries, seen,
                scale, half, DIM, ROPE, N, STAGES, LATE, TURNS,
            )  # fmt: skip
            target = out_ptr + q_begin.to(gl.int64) * out_token + head * out_head
            _store(target, result, first, queries, out_token, DIM)
            base += tiles
            count += 1


@gluon.jit
def _attend_all(
    buffers, barriers, base, count, tiles, open_tiles, position, seen, scale,
    half: gl.constexpr, DIM: gl.constexpr, ROPE: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, LATE: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Return the results [64, DIM] of a half of an item, from the tile with its last key down."""
    q_both, q_rope_both, keys, ropes, values = buffers
    q_ready, q_free, k_ready, k_free, v_ready, v_free, _ = barriers
    OUT: gl.constexpr = _product_layout(DIM)
    ROWS: gl.constexpr = gl.SliceLayout(1, _product_layout(N))
    q, q_rope = q_both.index(half), q_rope_both.index(half)
    position += gl.arange(0, 64, ROWS)
    top = gl.full([64], float("-inf"), gl.float32, ROWS)
    total = gl.zeros([64], gl.float32, ROWS)
    acc = gl.zeros([64, DIM], gl.float32, OUT)

    mbarrier.wait(q_ready, count & 1)
    _await(k_ready, base, STAGES)
    scores = _multiply_keys(q, q_rope, keys, ropes, base, ROPE, STAGES)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_free.index(base % STAGES), count=1)
    start = (tiles - 1) * N
    exact, top, total, decay = _softmax(scores, position, start, top, total, scale, True)
    weights = _as_operand(exact, keys.dtype, OUT)
    if start + N > seen:
        _await(v_ready, base, STAGES)
        _clear_after(values.index(base % STAGES), seen - start, DIM, N)
    _await(k_ready, base + 1, STAGES, tiles > 1)
    last = base + tiles
    masked = base + gl.maximum(tiles - open_tiles, 1)
    weights, acc, decay, top, total = _attend(
        buffers, barriers, q, q_rope, weights, acc, decay, top, total, position, scale,
        base + 1, masked, last, count, half, ROPE, N, STAGES, LATE, TURNS, True,
    )  # fmt: skip
    weights, acc, decay, top, total = _attend(
        buffers, barriers, q, q_rope, weights, acc, decay, top, total, position, scale,
        masked, last, last, count, half, ROPE, N, STAGES, LATE, TURNS, False,
    )  # fmt: skip
    mbarrier.arrive(q_free, count=1)
    if LATE:
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, OUT))[:, None]
    _await(v_ready, last - 1, STAGES)
    acc = warpgroup_mma(weights, values.index((last - 1) % STAGES), acc, is_async=True)
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    mbarrier.arrive(v_free.index((last - 1) % STAGES), count=1)
    return acc / gl.convert_layout(total, gl.SliceLayout(1, OUT))[:, None]


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


@gluon.jit(do_not_specialize=["scale", "items", "blocks", "sections"])
def _prefill_attention_hopper(
    q_map, q_rope_map, k_map, k_rope_map, v_map, out_ptr, cu_q_ptr, cu_k_ptr,
    scale, out_token, out_head, items, blocks, sections,
    TOGETHER: gl.constexpr, SHARING: gl.constexpr, DIM: gl.constexpr, ROPE: gl.constexpr,
    N: gl.constexpr, STAGES: gl.constexpr, LATE: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """An item is 128 queries of a head and row; those with the most keys come first."""
    dtype: gl.constexpr = q_map.dtype
    SHARED: gl.constexpr = ROPE if ROPE > 0 else 16
    buffers = (
        _allocate(dtype, 2, 64, DIM), _allocate(dtype, 2, 64, SHARED),
        _allocate(dtype, STAGES, N, DIM), _allocate(dtype, STAGES, N, SHARED),
        _allocate(dtype, STAGES, N, DIM),
    )  # fmt: skip
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_free, count=2)
    barriers = (
        q_ready, q_free, _make_barriers(STAGES, 1), _make_barriers(STAGES, 2),
        _make_barriers(STAGES, 1), _make_barriers(STAGES, 2), _make_barriers(2, 1),
    )  # fmt: skip
    fence_async_shared()
    maps = (q_map, q_rope_map, k_map, k_rope_map, v_map)
    lengths = (cu_q_ptr, cu_k_ptr, items, blocks, sections)
    turns = gl.cdiv(items, gl.num_programs(0))
    gl.warp_specialize(
        [
            (_own_half, (
                buffers, barriers, lengths, turns, out_ptr, out_token, out_head, scale, 0,
                TOGETHER, DIM, ROPE, N, STAGES, LATE, TURNS,
            )),
            (_own_half, (
                buffers, barriers, lengths, turns, out_ptr, out_token, out_head, scale, 1,
                TOGETHER, DIM, ROPE, N, STAGES, LATE, TURNS,
            )),
            (_copy_all, (
                maps, buffers, barriers, lengths, turns,
                TOGETHER, SHARING, DIM, ROPE, N, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
