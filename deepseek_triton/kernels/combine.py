"""Joining what the splits of a decode attention computed, alone or with the projection after it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.launch import await_inputs, dependent_launch
from deepseek_triton.kernels.paged_decode import Partials

_ROWS = 16  # rows of a program: the least that the tensor cores take


def combine(partials: Partials, dtype: torch.dtype) -> torch.Tensor:
    """Return the attention's result [B, H, d]: the splits' values weighted by their lse."""
    values, lse = partials.values, partials.lse
    batch, splits, heads, dim = values.shape
    if lse is None:
        return values[:, 0]
    out = torch.empty(batch, heads, dim, dtype=dtype, device=values.device)
    _combine[(batch, heads)](
        values, lse, out, splits,
        BLOCK_S=triton.next_power_of_2(splits), HEADS=heads,
        DIM=dim, BLOCK_D=triton.next_power_of_2(dim), **dependent_launch(values),
    )  # fmt: skip
    return out


def combine_project(
    partials: Partials,
    w_uv: torch.Tensor,
    *,
    block_v: int | None = None,
    warps: int | None = None,
) -> torch.Tensor:
    """Join the splits and take each head's result [rank] through w_uv [H, rank, v]: [B, H · v].

    All of one dtype. Sums are float32; between the two the joined values are rounded.
    """
    values, lse = partials.values, partials.lse
    batch, splits, heads, rank = values.shape
    v_dim = w_uv.shape[2]
    out = torch.empty(batch, heads * v_dim, dtype=w_uv.dtype, device=values.device)
    block_v = block_v or (32 if batch <= 16 else 64)
    block_v = min(block_v, max(16, triton.next_power_of_2(v_dim)))
    block_b = 1 if batch == 1 else _ROWS
    kernel = _combine_project_one if batch == 1 else _combine_project
    tiles = {} if batch == 1 else {"BLOCK_B": block_b, "IEEE": w_uv.dtype == torch.float32}
    kernel[(heads * triton.cdiv(v_dim, block_v), triton.cdiv(batch, block_b))](
        values, lse, w_uv, out, batch, splits,
        BLOCK_S=triton.next_power_of_2(splits), HEADS=heads,
        RANK=rank, BLOCK_D=max(16, triton.next_power_of_2(rank)), V_DIM=v_dim, BLOCK_V=block_v,
        num_warps=warps or 8, **tiles, **dependent_launch(values),
    )  # fmt: skip
    return out


def combine_reference(partials: Partials, dtype: torch.dtype) -> torch.Tensor:
    """Compute `combine` in float64 and round once."""
    values = partials.values.double()
    if partials.lse is None:
        return values[:, 0].to(dtype)
    lse = partials.lse.double() * torch.log(torch.tensor(2.0, dtype=torch.float64)).item()
    weights = lse.softmax(dim=1).nan_to_num(0.0)[..., None]
    return torch.where(weights > 0, values * weights, 0.0).sum(dim=1).to(dtype)


def combine_project_reference(partials: Partials, w_uv: torch.Tensor) -> torch.Tensor:
    """Compute `combine_project` in float64 and round once."""
    joined = combine_reference(partials, torch.float64)
    return torch.einsum("bhr,hrv->bhv", joined, w_uv.double()).flatten(1).to(w_uv.dtype)


@triton.jit
def _joined_lse(lse_ptr, row, head, valid, splits, BLOCK_S: tl.constexpr, HEADS: tl.constexpr):
    """Return log2 of the sum over all splits of rows [BLOCK_B]; 0 for a row without keys."""
    s = tl.arange(0, BLOCK_S)[None, :]
    mask = valid[:, None] & (s < splits)
    lse = tl.load(
        lse_ptr + (row[:, None] * splits + s) * HEADS + head, mask=mask, other=float("-inf")
    )
    top = tl.max(lse, axis=1)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - top[:, None]), axis=1)
    return tl.where(total == 0, 0.0, top + tl.log2(tl.maximum(total, 1e-37)))


@triton.jit
def _joined(
    values_ptr, lse_ptr, row, head, splits, BLOCK_S: tl.constexpr,
    HEADS: tl.constexpr, RANK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return the joined values [BLOCK_D] float32 of one row and head."""
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    part = (row * splits + s) * HEADS + head
    mask = (s < splits)[:, None] & (d < RANK)[None, :]
    # A split without keys wrote no values; they are loaded nonetheless, not to wait for its lse.
    values = tl.load(values_ptr + part[:, None] * RANK + d[None, :], mask=mask, other=0)
    if BLOCK_S == 1:
        return tl.sum(values.to(tl.float32), axis=0)
    lse = tl.load(lse_ptr + part, mask=s < splits, other=float("-inf"))
    top = tl.max(lse, axis=0)
    weights = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    weights = (weights / tl.maximum(tl.sum(weights, axis=0), 1e-37))[:, None]
    return tl.sum(tl.where(weights > 0, values, 0.0).to(tl.float32) * weights, axis=0)


@triton.jit
def _joined_rows(
    values_ptr, lse_ptr, row, head, valid, splits, BLOCK_S: tl.constexpr,
    HEADS: tl.constexpr, RANK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return the joined values [BLOCK_B, BLOCK_D] float32 of rows [BLOCK_B] and one head."""
    TOGETHER: tl.constexpr = BLOCK_S if BLOCK_S < 4 else 4  # splits whose loads are in flight
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = valid[:, None] & (d < RANK)
    if BLOCK_S == 1:
        part = row[:, None] * HEADS + head
        return tl.load(values_ptr + part * RANK + d, mask=mask, other=0).to(tl.float32)
    whole = _joined_lse(lse_ptr, row, head, valid, splits, BLOCK_S, HEADS)
    joined = tl.zeros(mask.shape, tl.float32)
    for start in range(0, splits, TOGETHER):
        for i in tl.static_range(TOGETHER):
            there = start + i < splits
            part = (row * splits + start + i) * HEADS + head
            lse = tl.load(lse_ptr + part, mask=valid & there, other=float("-inf"))
            values = tl.load(values_ptr + part[:, None] * RANK + d, mask=mask & there, other=0)
            weights = tl.exp2(lse - whole)[:, None]
            joined += tl.where(weights > 0, values, 0.0).to(tl.float32) * weights
    return joined


@triton.jit(do_not_specialize=["splits"])
def _combine(
    values_ptr, lse_ptr, out_ptr, splits,
    BLOCK_S: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, h) owns head h of row b."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    await_inputs(PDL)
    joined = _joined(values_ptr, lse_ptr, row, head, splits, BLOCK_S, HEADS, DIM, BLOCK_D)
    tl.store(out_ptr + (row * HEADS + head) * DIM + d, joined, mask=d < DIM)


@triton.jit(do_not_specialize=["splits"])
def _combine_project_one(
    values_ptr, lse_ptr, w_ptr, out_ptr, batch, splits,
    BLOCK_S: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr,
    BLOCK_D: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, b) owns BLOCK_V results of one head of row b."""
    chunks: tl.constexpr = (V_DIM + BLOCK_V - 1) // BLOCK_V
    head, row = tl.program_id(0) // chunks, tl.program_id(1).to(tl.int64)
    v = tl.program_id(0) % chunks * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.arange(0, BLOCK_D)
    mask = (d < RANK)[:, None] & (v < V_DIM)[None, :]
    w_head = w_ptr + head.to(tl.int64) * RANK * V_DIM
    w = tl.load(w_head + d[:, None] * V_DIM + v[None, :], mask=mask, other=0)
    await_inputs(PDL)
    joined = _joined(values_ptr, lse_ptr, row, head, splits, BLOCK_S, HEADS, RANK, BLOCK_D)
    joined = joined.to(w.dtype).to(tl.float32)
    out = tl.sum(joined[:, None] * w.to(tl.float32), axis=0)
    tl.store(out_ptr + (row * HEADS + head) * V_DIM + v, out, mask=v < V_DIM)


@triton.jit(do_not_specialize=["splits"])
def _combine_project(
    values_ptr, lse_ptr, w_ptr, out_ptr, batch, splits,
    BLOCK_S: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr,
    BLOCK_D: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j) owns BLOCK_V results of one head of BLOCK_B rows."""
    chunks: tl.constexpr = (V_DIM + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // chunks
    row = tl.program_id(1).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    v = tl.program_id(0) % chunks * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.arange(0, BLOCK_D)
    valid = row < batch
    mask = (d < RANK)[:, None] & (v < V_DIM)[None, :]
    w_head = w_ptr + head.to(tl.int64) * RANK * V_DIM
    w = tl.load(w_head + d[:, None] * V_DIM + v[None, :], mask=mask, other=0)
    await_inputs(PDL)
    joined = _joined_rows(
        values_ptr, lse_ptr, row, head, valid, splits, BLOCK_S, HEADS, RANK, BLOCK_D
    )
    acc = tl.dot(joined.to(w.dtype), w, input_precision="ieee" if IEEE else "tf32")
    out = (row * HEADS + head)[:, None] * V_DIM + v[None, :]
    tl.store(out_ptr + out, acc, mask=valid[:, None] & (v < V_DIM)[None, :])
