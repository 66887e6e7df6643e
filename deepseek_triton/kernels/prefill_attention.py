"""Causal attention of ragged prompts with their keys and values expanded: FlashAttention-2 form.

Keys may have a part that all heads share (the rope part of latent attention): it is a second
product rather than a copy a head. Several query heads may share a key head (grouped-query).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.paged_decode import LOG2_E
from deepseek_triton.kernels.prefill_attention_hopper import (
    HopperTile,
    fits,
    prefill_attention_hopper,
)

_MOST_EMPTY = 32  # room for queries (rows times `max_q`) of one that is there


@dataclass(frozen=True)
class PrefillTile:
    """Queries and keys of a program's step, and its launch."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def choose_tile(width: int, dtype: torch.dtype) -> PrefillTile:
    """Choose a layout for keys of `width` numbers, which fits the shared memory of an H200."""
    if dtype == torch.float32:
        return PrefillTile(32, 32, 4, 1)
    if width > 128:
        return PrefillTile(128, 64, 8, 3)
    return PrefillTile(128, 128, 8, 2)


def prefill_attention(
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
    tile: PrefillTile | HopperTile | None = None,
) -> torch.Tensor:
    """Return softmax(q · keysᵀ · scale) · v [T, H, e], each query looking at itself and before.

    q [T, H, d + p], k [K, G, d], v [K, G, e], H a multiple of G, whose heads share keys in turns of
    H / G; k_rope [K, p] the part of the keys that all heads share, if there is one. Views may have
    any strides but in the last dimension, which is contiguous. Row i of the batch is queries
    cu_q[i] … cu_q[i + 1] and keys cu_k[i] … cu_k[i + 1] (int32, [R + 1]); the queries are the last
    of the keys. `max_q` is the most queries of a row. The kernel is that of `tile`, else the
    Hopper one where it fits and most of its programs, large ones, have queries.
    """
    crowded = (len(cu_q) - 1) * max_q <= _MOST_EMPTY * len(q)
    if isinstance(tile, HopperTile) or (tile is None and crowded and fits(q, k, v, k_rope)):
        return prefill_attention_hopper(
            q, k, v, cu_q, cu_k, max_q=max_q, scale=scale, k_rope=k_rope, out=out, tile=tile
        )
    tokens, heads, width = q.shape
    dim, value_dim = k.shape[2], v.shape[2]
    if out is None:
        out = torch.empty(tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    if tile is None:
        tile = choose_tile(width, q.dtype)
    rope_stride = 0 if k_rope is None else k_rope.stride(0)
    grid = (triton.cdiv(max_q, tile.block_m), heads, len(cu_q) - 1)
    _prefill_attention[grid](
        q, k, v, k_rope, out, cu_q, cu_k, scale * LOG2_E,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        rope_stride, out.stride(0), out.stride(1),
        SHARING=heads // k.shape[1],
        DIM=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)),
        ROPE=width - dim, BLOCK_R=max(16, triton.next_power_of_2(width - dim)),
        VALUE=value_dim, BLOCK_V=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, STAGES=tile.stages,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=tile.warps,
    )  # fmt: skip
    return out


def prefill_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *,
    scale: float,
    k_rope: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `prefill_attention` in float64 and round once."""
    heads, groups = q.shape[1], k.shape[1]
    out = torch.empty(len(q), heads, v.shape[2], dtype=torch.float64, device=q.device)
    keys = k.double().repeat_interleave(heads // groups, dim=1)
    if k_rope is not None:
        shared = k_rope.double()[:, None].expand(-1, heads, -1)
        keys = torch.cat((keys, shared), dim=-1)
    values = v.double().repeat_interleave(heads // groups, dim=1)
    for i in range(len(cu_q) - 1):
        rows, seen = slice(*cu_q[i : i + 2].tolist()), slice(*cu_k[i : i + 2].tolist())
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), keys[seen]) * scale
        count, total = scores.shape[1:]
        hidden = torch.ones(count, total, dtype=torch.bool, device=q.device)
        hidden = hidden.triu(total - count + 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hqk,khe->qhe", weights, values[seen])
    return out.to(q.dtype)


@triton.jit
def _load(row_ptr, valid, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Return [rows, BLOCK] numbers from row_ptr [rows, 1]: zeros beyond DIM, if MASKED, valid."""
    d = tl.arange(0, BLOCK)[None, :]
    if MASKED:
        return tl.load(row_ptr + d, mask=valid[:, None] & (d < DIM), other=0)
    elif DIM != BLOCK:
        return tl.load(row_ptr + d, mask=d < DIM, other=0)
    else:
        return tl.load(row_ptr + d)


@triton.jit
def _attend(
    q, q_rope, k_ptr, v_ptr, rope_ptr, begin, end, position, keys, top, total, acc, scale,
    k_stride, v_stride, rope_stride,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr,
    VALUE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the keys begin … end into the running maximum and sum [M] and the values [M, V]."""
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        valid = n < keys
        row = n.to(tl.int64)[:, None]
        k = _load(k_ptr + row * k_stride, valid, DIM, BLOCK_D, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if ROPE > 0:
            k_rope = _load(rope_ptr + row * rope_stride, valid, ROPE, BLOCK_R, MASKED)
            scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision=PRECISION)
        if MASKED:
            scores = tl.where(n[None, :] <= position[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
        decay = tl.exp2(top - new_top)
        weights = tl.exp2(scores * scale - new_top[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        v = _load(v_ptr + row * v_stride, valid, VALUE, BLOCK_V, MASKED)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        top = new_top
    return top, total, acc


@triton.jit
def _prefill_attention(
    q_ptr, k_ptr, v_ptr, rope_ptr, out_ptr, cu_q_ptr, cu_k_ptr, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, rope_stride, out_token, out_head,
    SHARING: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr,
    VALUE: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (i, h, r) owns BLOCK_M queries of head h and row r, the last ones first."""
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2)
    q_begin, k_begin = tl.load(cu_q_ptr + row).to(tl.int64), tl.load(cu_k_ptr + row).to(tl.int64)
    queries = (tl.load(cu_q_ptr + row + 1) - q_begin).to(tl.int32)
    keys = (tl.load(cu_k_ptr + row + 1) - k_begin).to(tl.int32)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if first >= queries:
        return
    m = first + tl.arange(0, BLOCK_M)
    valid = m < queries
    position = m + keys - queries
    q_rows = q_ptr + (q_begin + m)[:, None] * q_token + head * q_head
    q = _load(q_rows, valid, DIM, BLOCK_D, True)
    q_rope = _load(q_rows + DIM, valid, ROPE, BLOCK_R, True) if ROPE > 0 else q
    k_ptr += k_begin * k_token + head // SHARING * k_head
    v_ptr += k_begin * v_token + head // SHARING * v_head
    if ROPE > 0:
        rope_ptr += k_begin * rope_stride

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    # All queries look at the keys up to the first one's; those after it need a mask.
    open_end = (first + keys - queries + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(first + BLOCK_M + keys - queries, keys)
    top, total, acc = _attend(
        q, q_rope, k_ptr, v_ptr, rope_ptr, 0, open_end, position, keys, top, total, acc, scale,
        k_token, v_token, rope_stride, DIM, BLOCK_D, ROPE, BLOCK_R, VALUE, BLOCK_V,
        BLOCK_N, STAGES, PRECISION, False,
    )  # fmt: skip
    top, total, acc = _attend(
        q, q_rope, k_ptr, v_ptr, rope_ptr, open_end, end, position, keys, top, total, acc, scale,
        k_token, v_token, rope_stride, DIM, BLOCK_D, ROPE, BLOCK_R, VALUE, BLOCK_V,
        BLOCK_N, STAGES, PRECISION, True,
    )  # fmt: skip
    v = tl.arange(0, BLOCK_V)[None, :]
    out_rows = out_ptr + (q_begin + m)[:, None] * out_token + head * out_head
    tl.store(out_rows + v, acc / total[:, None], mask=valid[:, None] & (v < VALUE))
