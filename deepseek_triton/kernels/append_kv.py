"""New rows of the KV cache: made from a layer's projections and written into the paged pools."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.launch import await_inputs, dependent_launch
from deepseek_triton.kernels.rms_norm import rms_norm_reference
from deepseek_triton.kernels.rotary import rotary_reference, rotated

_TILE = 2048


def append_latent(
    kv_a: torch.Tensor,
    kv_norm: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    interleaved: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm the latent part of kv_a [T, rank + rope], turn its rope part, and write both into pool.

    kv_a may be a view with contiguous rows; kv_norm [rank]; cos, sin [T, rope] float32 as `rotary`
    takes them; pool [N, block_size, rank + rope]; slots [T] int32, block · block_size + offset, or
    −1 for a row that is not written. Returns all rows [T, rank + rope], also those. Mutates pool.
    """
    tokens, width = kv_a.shape
    rank, rope = len(kv_norm), cos.shape[-1]
    if out is None:
        out = torch.empty(tokens, width, dtype=kv_a.dtype, device=kv_a.device)
    if tokens:
        _append_latent[(tokens,)](
            kv_a, kv_norm, cos, sin, pool, slots, out, kv_a.stride(0), eps,
            RANK=rank, ROPE=rope,
            BLOCK_D=triton.next_power_of_2(rank), BLOCK_R=triton.next_power_of_2(rope),
            INTERLEAVED=interleaved, **dependent_launch(kv_a),
        )  # fmt: skip
    return out


def append_latent_reference(
    kv_a: torch.Tensor,
    kv_norm: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    interleaved: bool,
) -> torch.Tensor:
    """Compute `append_latent` in float64 and round once. Mutates pool."""
    latent, rope = kv_a.split((len(kv_norm), cos.shape[-1]), dim=-1)
    turned = rotary_reference(rope[:, None], cos, sin, interleaved=interleaved)[:, 0]
    rows = torch.cat((rms_norm_reference(latent, kv_norm, eps), turned), dim=-1)
    _write_rows(pool, rows, slots)
    return rows


def append_grouped_query(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn q [T, H, d] and k [T, G, d], write k and v [T, G, d] into the pools.

    q, k, v may be views whose last two dimensions are contiguous; cos, sin [T, d] as `rotary` takes
    them; pools [N, block_size, G·d]; slots as in `append_latent`. Returns the turned q and k,
    contiguous. Mutates the pools.
    """
    tokens, heads, dim = q.shape
    groups = k.shape[1]
    q_out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    k_out = torch.empty(tokens, groups, dim, dtype=q.dtype, device=q.device)
    if tokens:
        block_d = triton.next_power_of_2(dim)
        block_h = min(triton.next_power_of_2(max(heads, groups)), max(1, _TILE // block_d))
        q_programs, kv_programs = triton.cdiv(heads, block_h), triton.cdiv(groups, block_h)
        _append_grouped_query[(tokens, q_programs + 2 * kv_programs)](
            q, k, v, cos, sin, k_pool, v_pool, slots, q_out, k_out,
            q.stride(0), k.stride(0), v.stride(0),
            HEADS=heads, GROUPS=groups, DIM=dim, BLOCK_D=block_d, BLOCK_H=block_h,
            Q_PROGRAMS=q_programs, KV_PROGRAMS=kv_programs, INTERLEAVED=interleaved,
            **dependent_launch(q),
        )  # fmt: skip
    return q_out, k_out


def append_grouped_query_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `append_grouped_query` in float64 and round once. Mutates the pools."""
    turned_k = rotary_reference(k, cos, sin, interleaved=interleaved)
    _write_rows(k_pool, turned_k.flatten(1), slots)
    _write_rows(v_pool, v.flatten(1), slots)
    return rotary_reference(q, cos, sin, interleaved=interleaved), turned_k


def _write_rows(pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    written = slots >= 0
    pool.view(-1, pool.shape[-1])[slots[written].long()] = rows[written]


@triton.jit
def latent_rows(
    kv_ptr, norm_ptr, cos_ptr, sin_ptr, pool_ptr, slots_ptr, out_ptr, t, valid_t, kv_stride, eps,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Make the cache rows of tokens t [BLOCK_T]; write them into the pool and, if given, to out."""
    WIDTH: tl.constexpr = RANK + ROPE
    d = tl.arange(0, BLOCK_D)[None, :]
    r = tl.arange(0, BLOCK_R)[None, :]
    token = t.to(tl.int64)[:, None]
    valid_d = valid_t[:, None] & (d < RANK)
    valid_r = valid_t[:, None] & (r < ROPE)
    slot = tl.load(slots_ptr + t, mask=valid_t, other=-1)[:, None]
    row = slot.to(tl.int64) * WIDTH
    weight = tl.load(norm_ptr + d, mask=d < RANK, other=0).to(tl.float32)
    x = tl.load(kv_ptr + token * kv_stride + d, mask=valid_d, other=0).to(tl.float32)
    turned = rotated(  # before the sum, which loads do not pass
        kv_ptr + token * kv_stride + RANK, cos_ptr + token * ROPE, sin_ptr + token * ROPE,
        r, valid_r, ROPE, INTERLEAVED,
    )  # fmt: skip
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / RANK + eps)
    latent = x * scale[:, None] * weight
    tl.store(pool_ptr + row + d, latent, mask=valid_d & (slot >= 0))
    tl.store(pool_ptr + row + RANK + r, turned, mask=valid_r & (slot >= 0))
    if out_ptr is not None:
        tl.store(out_ptr + token * WIDTH + d, latent, mask=valid_d)
        tl.store(out_ptr + token * WIDTH + RANK + r, turned, mask=valid_r)


@triton.jit
def _append_latent(
    kv_ptr, norm_ptr, cos_ptr, sin_ptr, pool_ptr, slots_ptr, out_ptr, kv_stride, eps,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program t owns token t."""
    t = tl.program_id(0) + tl.arange(0, 1)
    await_inputs(PDL)
    latent_rows(
        kv_ptr, norm_ptr, cos_ptr, sin_ptr, pool_ptr, slots_ptr, out_ptr, t, t >= 0, kv_stride, eps,
        RANK, ROPE, BLOCK_D, BLOCK_R, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def _append_grouped_query(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, k_pool_ptr, v_pool_ptr, slots_ptr, q_out_ptr, k_out_ptr,
    q_stride, k_stride, v_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    Q_PROGRAMS: tl.constexpr, KV_PROGRAMS: tl.constexpr,
    INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, i) owns BLOCK_H heads of token t: those of q, then of k, then of v."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)[None, :]
    lane = tl.arange(0, BLOCK_H)[:, None]
    await_inputs(PDL)
    cos_row, sin_row = cos_ptr + token * DIM, sin_ptr + token * DIM
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if i < Q_PROGRAMS:
        h = i * BLOCK_H + lane
        valid = (h < HEADS) & (d < DIM)
        q = rotated(
            q_ptr + token * q_stride + h * DIM, cos_row, sin_row, d, valid, DIM, INTERLEAVED
        )
        tl.store(q_out_ptr + (token * HEADS + h) * DIM + d, q, mask=valid)
    elif i < Q_PROGRAMS + KV_PROGRAMS:
        h = (i - Q_PROGRAMS) * BLOCK_H + lane
        valid = (h < GROUPS) & (d < DIM)
        k = rotated(
            k_ptr + token * k_stride + h * DIM, cos_row, sin_row, d, valid, DIM, INTERLEAVED
        )
        tl.store(k_out_ptr + (token * GROUPS + h) * DIM + d, k, mask=valid)
        tl.store(k_pool_ptr + (slot * GROUPS + h) * DIM + d, k, mask=valid & (slot >= 0))
    else:
        h = (i - Q_PROGRAMS - KV_PROGRAMS) * BLOCK_H + lane
        valid = (h < GROUPS) & (d < DIM)
        v = tl.load(v_ptr + token * v_stride + h * DIM + d, mask=valid, other=0)
        tl.store(v_pool_ptr + (slot * GROUPS + h) * DIM + d, v, mask=valid & (slot >= 0))
