"""Attention of one new token a row over a paged KV pool, its keys split among programs.

One kernel serves latent attention (all heads share one cached row, whose first part is also the
value) and grouped-query attention (each group of heads has its keys and values). Scores are kept
transposed, [keys, heads]: the tensor cores want 64 rows, which keys fill and 16 heads would not.

Each split writes a result normed on its own keys and the log-sum-exp of their scores, by which the
splits are joined (Flash-Decoding; arXiv 2205.14135, section 3.1 for the algebra). The number of
splits is a host's choice; where they begin follows from the context length on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.launch import await_inputs, dependent_launch

LOG2_E = 1.4426950408889634
PROGRAMS = 132  # multiprocessors of an H100 or H200; on other cards it is only less well balanced
_MAX_SPLITS = 64
_SPLIT_KEYS = 128  # of capacity, at least: joining more splits costs more than it gains


@dataclass(frozen=True)
class KeyFilter:
    """Which cached keys a query looks at; all of them where a field is None.

    A key must pass every filter that is set. `retained` [H] int32 keeps, for each head, the most
    recent keys of that number, and the first `sink`. `block_mask` [B, ceil(M / 32)] int32 has bit
    i % 32 of word i // 32 set if the row looks at the i-th block of its table. `key_experts`
    [N, block_size] int32, one number for each slot of the pool, must equal the row's
    `query_experts` [B] int32.
    """

    retained: torch.Tensor | None = None
    sink: int = 0
    block_mask: torch.Tensor | None = None
    key_experts: torch.Tensor | None = None
    query_experts: torch.Tensor | None = None


NO_FILTER = KeyFilter()


@dataclass(frozen=True)
class DecodeTile:
    """How the kernel is laid out: keys and heads of a program's step, and its launch.

    `stages` is at least 2 for 16-bit types. With one, tiles of 64 keys gave wrong results or an
    illegal memory access on an H200 (Triton 3.6, ptxas 12.8), although no read of the kernel is
    out of bounds under compute-sanitizer; tiles of 32 and 128 keys were right.
    """

    splits: int
    block_n: int
    block_h: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Partials:
    """Results of the splits, to be joined: values [B, S, H, d] and lse [B, S, H] in log2.

    Values have the query's dtype, lse is float32. A split without keys has an lse of −inf, and
    values that are not written. With one split, lse is None and the values [B, 1, H, d] the result.
    """

    values: torch.Tensor
    lse: torch.Tensor | None


def choose_tile(
    batch: int, groups: int, heads: int, width: int, capacity: int, dtype: torch.dtype
) -> DecodeTile:
    """Choose a layout that gives each multiprocessor about one program.

    `heads` of each group share their keys, `width` numbers each; a row has up to `capacity` keys.
    """
    wide = triton.next_power_of_2(width) > 256
    block_h = min(32 if wide else 64, max(16, triton.next_power_of_2(heads)))
    if dtype == torch.float32:
        block_n, stages = 16 if wide else 32, 1
    else:
        block_n, stages = (32 if wide else 64), 5  # two tiles ahead: see the loop
    splits = choose_splits(batch * groups * triton.cdiv(heads, block_h), capacity)
    return DecodeTile(splits, block_n, block_h, 4, stages)


def choose_splits(programs: int, capacity: int) -> int:
    """Return in how many splits `programs` programs fill the card, of up to `capacity` keys."""
    tiles = max(1, -(-capacity // _SPLIT_KEYS))
    return min(max(1, PROGRAMS // programs), tiles, _MAX_SPLITS)


def paged_decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor | None,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    groups: int,
    value_dim: int,
    key_filter: KeyFilter = NO_FILTER,
    tile: DecodeTile | None = None,
) -> Partials:
    """Return softmax(q · keysᵀ · scale) · values of each split.

    q [B, H, D], heads of a group adjacent; k_pool [N, block_size, groups · D]; v_pool [N,
    block_size, groups · value_dim], or None: a key's first value_dim numbers are its value (one
    group). block_tables [B, M] int32; context_lens [B] int32, the new token's key, which is in the
    pool already, included; 0 gives zeros; it is read early, so the kernel launched just before must
    not be what writes it. block_size is a power of two of at least 16. Slots beyond a row's context
    are not read. Raises ValueError for a tile that this type cannot have (DecodeTile).
    """
    batch, heads, width = q.shape
    capacity = block_tables.shape[1] * k_pool.shape[1]
    group_size = heads // groups
    if tile is None:
        tile = choose_tile(batch, groups, group_size, width, capacity, q.dtype)
    if tile.stages < 2 and q.is_cuda and q.dtype != torch.float32:
        raise ValueError(f"tile.stages is {tile.stages}; {q.dtype} needs at least 2 on a GPU")
    shape = (batch, tile.splits, heads)
    whole = tile.splits == 1
    values = torch.empty(*shape, value_dim, dtype=q.dtype, device=q.device)
    lse = None if whole else torch.empty(shape, dtype=torch.float32, device=q.device)
    rope = width - value_dim if v_pool is None else 0
    mask = key_filter.block_mask
    grid = (tile.splits, groups * triton.cdiv(group_size, tile.block_h), batch)
    _paged_decode[grid](
        q, k_pool, v_pool, block_tables, context_lens, values, lse,
        key_filter.retained, mask, key_filter.key_experts, key_filter.query_experts,
        scale * LOG2_E, key_filter.sink, tile.splits,
        q.stride(0), q.stride(1), block_tables.stride(0), 0 if mask is None else mask.stride(0),
        K_ROW=k_pool.shape[2], V_ROW=(k_pool if v_pool is None else v_pool).shape[2],
        BLOCK_SIZE=k_pool.shape[1], HEADS=heads, GROUP_SIZE=group_size,
        DIM=value_dim, BLOCK_D=max(16, triton.next_power_of_2(value_dim)),
        ROPE=rope, BLOCK_R=max(16, triton.next_power_of_2(rope)),
        WHOLE=whole, BLOCK_N=tile.block_n, BLOCK_H=tile.block_h, STAGES=tile.stages,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, **dependent_launch(q),
    )  # fmt: skip
    return Partials(values, lse)


def paged_decode_reference(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor | None,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    groups: int,
    value_dim: int,
    key_filter: KeyFilter = NO_FILTER,
) -> torch.Tensor:
    """Compute `paged_decode` in float64, its splits joined, and round once: [B, H, value_dim]."""
    batch, heads, width = q.shape
    out = torch.zeros(batch, heads, value_dim, dtype=torch.float64, device=q.device)
    for row in range(batch):
        length = int(context_lens[row])
        table = block_tables[row].long()
        keys = k_pool[table].flatten(0, 1)[:length].double().unflatten(1, (groups, -1))
        if v_pool is None:
            values = keys[..., :value_dim]
        else:
            values = v_pool[table].flatten(0, 1)[:length].double().unflatten(1, (groups, -1))
        query = q[row].double().view(groups, -1, width)
        scores = torch.einsum("gnd,kgd->gnk", query, keys).flatten(0, 1) * scale
        hidden = ~_visible(row, table, length, heads, k_pool.shape[1], key_filter)
        weights = scores.masked_fill(hidden.to(q.device), -torch.inf).softmax(-1).nan_to_num(0.0)
        weights = weights.view(groups, heads // groups, length)
        out[row] = torch.einsum("gnk,kgd->gnd", weights, values).flatten(0, 1)
    return out.to(q.dtype)


def _visible(
    row: int, table: torch.Tensor, length: int, heads: int, block_size: int, keep: KeyFilter
) -> torch.Tensor:
    """Return which keys [H, length] the heads of a row look at."""
    position = torch.arange(length, device=table.device)
    visible = torch.ones(heads, length, dtype=torch.bool, device=table.device)
    if keep.retained is not None:
        recent = position >= length - keep.retained[:, None]
        visible &= recent | (position < keep.sink)
    if keep.block_mask is not None:
        block = position // block_size
        visible &= (keep.block_mask[row][block // 32] >> (block % 32)) & 1 == 1
    if keep.key_experts is not None and keep.query_experts is not None:
        visible &= keep.key_experts[table].flatten()[:length] == keep.query_experts[row]
    return visible


@triton.jit
def _slots(table_ptr, tile, length, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the pool slot of a tile's first key, or of each key if it goes over several blocks."""
    start = tile * BLOCK_N
    if BLOCK_SIZE >= BLOCK_N:
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        return block * BLOCK_SIZE + start % BLOCK_SIZE
    else:
        # The table may end with the row's last key, inside this tile.
        at = tl.minimum(start + tl.arange(0, BLOCK_N), tl.maximum(length - 1, 0))
        block = tl.load(table_ptr + at // BLOCK_SIZE).to(tl.int64)
        return block * BLOCK_SIZE + at % BLOCK_SIZE


@triton.jit
def _rows(ptr, slot, ROW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return pointers [BLOCK_N, 1] to the rows of a tile, `slot` being what `_slots` returns."""
    if BLOCK_SIZE >= BLOCK_N:  # distances within a block do not change: they cost nothing
        return (ptr + slot * ROW) + (tl.arange(0, BLOCK_N) * ROW)[:, None]
    else:
        return ptr + (slot * ROW)[:, None]


@triton.jit
def _load_rows(row_ptr, seen, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return [BLOCK_N, BLOCK] numbers from row_ptr [BLOCK_N, 1]: zeros where not seen."""
    d = tl.arange(0, BLOCK)[None, :]
    mask = seen[:, None]
    if DIM != BLOCK:
        mask = mask & (d < DIM)
    return tl.load(row_ptr + d, mask=mask, other=0)


@triton.jit
def _load_columns(column_ptr, valid, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return [BLOCK, BLOCK_H] numbers from column_ptr [BLOCK_H]: zeros where not valid."""
    d = tl.arange(0, BLOCK)[:, None]
    return tl.load(column_ptr[None, :] + d, mask=valid[None, :] & (d < DIM), other=0)


@triton.jit
def _passing(
    key, slot, length, row, retained, sink, retained_ptr, block_mask_ptr, mask_row,
    key_experts_ptr, query_experts_ptr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Return the keys [BLOCK_N] that any head looks at, and those of each [BLOCK_N, BLOCK_H]."""
    seen = key < length
    if retained_ptr is not None:
        seen = seen & ((key >= length - tl.max(retained, axis=0)) | (key < sink))
    if block_mask_ptr is not None:
        index = key // BLOCK_SIZE
        word = tl.load(block_mask_ptr + row * mask_row + index // 32, mask=seen, other=0)
        seen = seen & (((word >> (index % 32)) & 1) == 1)
    if query_experts_ptr is not None:
        slots = slot + tl.arange(0, BLOCK_N) if BLOCK_SIZE >= BLOCK_N else slot
        expert = tl.load(key_experts_ptr + slots, mask=seen, other=0)
        seen = seen & (expert == tl.load(query_experts_ptr + row))
    visible = seen[:, None]
    if retained_ptr is not None:
        recent = key[:, None] >= length - retained[None, :]
        visible = visible & (recent | (key < sink)[:, None])
    return seen, visible


@triton.jit
def _attend(
    scores, v, visible, top, total, acc, scale, PRECISION: tl.constexpr
):  # fmt: skip
    """Take one tile into the running maximum [H], the sums [N, H] and the values [D, H]."""
    scores = tl.where(visible, scores * scale, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=0))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    decay = tl.exp2(top - base)[None, :]
    weights = tl.exp2(scores - base[None, :])
    acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc * decay, input_precision=PRECISION)
    return new_top, total * decay + weights, acc


@triton.jit
def _scores(
    k_rows, v_rows, seen, q, q_rope, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROPE: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the products [BLOCK_N, BLOCK_H] of keys and queries, and the values."""
    k = _load_rows(k_rows, seen, DIM, BLOCK_D)
    scores = tl.dot(k, q, input_precision=PRECISION)
    if ROPE > 0:
        k_rope = _load_rows(k_rows + DIM, seen, ROPE, BLOCK_R)
        scores = tl.dot(k_rope, q_rope, scores, input_precision=PRECISION)
    v = k
    if v_rows is not None:
        v = _load_rows(v_rows, seen, DIM, BLOCK_D)
    return scores, v


@triton.jit
def _range(length, splits, BLOCK_N: tl.constexpr):
    """Return the first tile of this split and the one after its last; splits differ by one."""
    tiles, split = tl.cdiv(length, BLOCK_N), tl.program_id(0)
    return tl.cdiv(tiles * split, splits), tl.cdiv(tiles * (split + 1), splits)


@triton.jit(do_not_specialize=["splits", "sink"])
def _paged_decode(
    q_ptr, k_pool_ptr, v_pool_ptr, tables_ptr, lens_ptr, values_ptr, lse_ptr,
    retained_ptr, block_mask_ptr, key_experts_ptr, query_experts_ptr,
    scale, sink, splits, q_row, q_head, table_row, mask_row,
    K_ROW: tl.constexpr, V_ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (s, i, b) owns split s of row b for the i-th BLOCK_H heads."""
    row = tl.program_id(2).to(tl.int64)
    blocks_per_group: tl.constexpr = (GROUP_SIZE + BLOCK_H - 1) // BLOCK_H
    group = tl.program_id(1) // blocks_per_group
    in_group = tl.program_id(1) % blocks_per_group * BLOCK_H + tl.arange(0, BLOCK_H)
    valid_h = in_group < GROUP_SIZE
    head = group * GROUP_SIZE + in_group
    table_ptr = tables_ptr + row * table_row
    length = tl.load(lens_ptr + row)
    first, last = _range(length, splits, BLOCK_N)
    await_inputs(PDL)
    q_heads = q_ptr + row * q_row + head * q_head
    q = _load_columns(q_heads, valid_h, DIM, BLOCK_D)
    q_rope = _load_columns(q_heads + DIM, valid_h, ROPE, BLOCK_R) if ROPE > 0 else q
    retained = head
    if retained_ptr is not None:
        retained = tl.load(retained_ptr + head, mask=valid_h, other=0)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)  # added up over keys once, after the loop
    acc = tl.zeros([BLOCK_D, BLOCK_H], tl.float32)
    for tile in tl.range(first, last, num_stages=STAGES):
        # Read in the loop, not carried from step to step: only then the compiler sends the loads
        # of table and keys ahead. Each gets half of the stages.
        slot = _slots(table_ptr, tile, length, BLOCK_N, BLOCK_SIZE)
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        seen, visible = _passing(
            key, slot, length, row, retained, sink, retained_ptr, block_mask_ptr, mask_row,
            key_experts_ptr, query_experts_ptr, BLOCK_N, BLOCK_SIZE,
        )  # fmt: skip
        k_rows = _rows(k_pool_ptr + group * DIM, slot, K_ROW, BLOCK_N, BLOCK_SIZE)
        v_rows = None
        if v_pool_ptr is not None:
            v_rows = _rows(v_pool_ptr + group * DIM, slot, V_ROW, BLOCK_N, BLOCK_SIZE)
        scores, v = _scores(k_rows, v_rows, seen, q, q_rope, DIM, BLOCK_D, ROPE, BLOCK_R, PRECISION)
        top, total, acc = _attend(scores, v, visible, top, total, acc, scale, PRECISION)

    whole = tl.sum(total, axis=0)
    result = (row * splits + tl.program_id(0)) * HEADS + head
    if not WHOLE:
        lse = tl.where(whole == 0, float("-inf"), top + tl.log2(tl.maximum(whole, 1e-37)))
        tl.store(lse_ptr + result, lse, mask=valid_h)
        valid_h = valid_h & (first < last)  # nothing reads the values of a split without keys
    d = tl.arange(0, BLOCK_D)[None, :]
    values = tl.trans(acc) / tl.where(whole == 0, 1.0, whole)[:, None]
    mask = valid_h[:, None] & (d < DIM)
    tl.store(values_ptr + result[:, None] * DIM + d, values, mask=mask)
