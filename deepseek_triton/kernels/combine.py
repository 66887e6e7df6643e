"""Joining what the splits of a decode attention computed, alone or with the projection after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.launch import await_inputs, dependent_launch
from deepseek_triton.kernels.paged_decode import Partials

_ROWS = 16  # rows of a program: the least that the tensor cores take


@dataclass(frozen=True)
class ProjectTile:
    """Results and rank dimensions of a program's step in `combine_project`, and its launch."""

    block_v: int
    block_k: int
    warps: int
    stages: int


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
    partials: Partials, w_uv: torch.Tensor, *, tile: ProjectTile | None = None
) -> torch.Tensor:
    """Join the splits and take each head's result [rank] through w_uv [H, rank, v]: [B, H · v].

    All of one dtype. Sums are float32; between the two the joined values are rounded. `tile` is
    for several rows.
    """
    values, lse = partials.values, partials.lse
    batch, splits, heads, rank = values.shape
    v_dim = w_uv.shape[2]
    out = torch.empty(batch, heads * v_dim, dtype=w_uv.dtype, device=values.device)
    most_v = max(16, triton.next_power_of_2(v_dim))
    sizes = {"HEADS": heads, "RANK": rank, "V_DIM": v_dim}
    if batch == 1:
        block_v = min(16, most_v)
        _combine_project_one[(heads * triton.cdiv(v_dim, block_v),)](
            values, lse, w_uv, out, splits,
            BLOCK_S=triton.next_power_of_2(splits), BLOCK_D=max(16, triton.next_power_of_2(rank)),
            BLOCK_V=block_v, num_warps=2, **sizes, **dependent_launch(values),
        )  # fmt: skip
        return out
    tile = tile or ProjectTile(32 if batch <= 16 else 64, 128, 4, 3)
    block_v = min(tile.block_v, most_v)
    _combine_project[(heads * triton.cdiv(v_dim, block_v), triton.cdiv(batch, _ROWS))](
        values, lse, w_uv, out, batch,
        SPLITS=splits, BLOCK_S=triton.next_power_of_2(splits), BLOCK_B=_ROWS, BLOCK_V=block_v,
        BLOCK_K=min(tile.block_k, max(16, triton.next_power_of_2(rank))), STAGES=tile.stages,
        IEEE=w_uv.dtype == torch.float32, num_warps=tile.warps, **sizes, **dependent_launch(values),
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
def _split_weights(
    lse_ptr, row, head, valid, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """Return how much each split counts: [BLOCK_B, BLOCK_S] float32; 0 in a row without keys."""
    s = tl.arange(0, BLOCK_S)[None, :]
    at = (row[:, None] * SPLITS + s) * HEADS + head
    lse = tl.load(lse_ptr + at, mask=valid[:, None] & (s < SPLITS), other=float("-inf"))
    top = tl.max(lse, axis=1)
    weights = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top)[:, None])
    return weights / tl.maximum(tl.sum(weights, axis=1), 1e-37)[:, None]


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
    values_ptr, lse_ptr, w_ptr, out_ptr, splits,
    BLOCK_S: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr,
    BLOCK_D: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: program i owns BLOCK_V results of a head."""
    chunks: tl.constexpr = (V_DIM + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // chunks
    v = tl.program_id(0) % chunks * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.arange(0, BLOCK_D)
    mask = (d < RANK)[:, None] & (v < V_DIM)[None, :]
    w_head = w_ptr + head.to(tl.int64) * RANK * V_DIM
    w = tl.load(w_head + d[:, None] * V_DIM + v[None, :], mask=mask, other=0)
    await_inputs(PDL)
    joined = _joined(values_ptr, lse_ptr, 0, head, splits, BLOCK_S, HEADS, RANK, BLOCK_D)
    joined = joined.to(w.dtype).to(tl.float32)
    out = tl.sum(joined[:, None] * w.to(tl.float32), axis=0)
    tl.store(out_ptr + head * V_DIM + v, out, mask=v < V_DIM)


@triton.jit
def _combine_project(
    values_ptr, lse_ptr, w_ptr, out_ptr, batch,
    SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr,
    BLOCK_K: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr,
    STAGES: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j) owns BLOCK_V results of one head of BLOCK_B rows."""
    chunks: tl.constexpr = (V_DIM + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // chunks
    row = tl.program_id(1).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    v = tl.program_id(0) % chunks * BLOCK_V + tl.arange(0, BLOCK_V)
    valid = row < batch
    s = tl.arange(0, BLOCK_S)[None, :]
    w_head = w_ptr + head.to(tl.int64) * RANK * V_DIM
    await_inputs(PDL)
    if SPLITS > 1:
        weights = _split_weights(lse_ptr, row, head, valid, SPLITS, BLOCK_S, HEADS)
    acc = tl.zeros([BLOCK_B, BLOCK_V], tl.float32)
    for start in tl.range(0, RANK, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        mask = valid[:, None] & (k < RANK)[None, :]
        joined = tl.zeros([BLOCK_B, BLOCK_K], tl.float32)
        for i in tl.static_range(SPLITS):
            part = ((row * SPLITS + i) * HEADS + head) * RANK
            values = tl.load(values_ptr + part[:, None] + k[None, :], mask=mask, other=0)
            if SPLITS == 1:
                joined = values.to(tl.float32)
            else:  # a split without keys wrote no values
                weight = tl.sum(tl.where(s == i, weights, 0.0), axis=1)[:, None]
                joined += tl.where(weight > 0, values, 0.0).to(tl.float32) * weight
        w_mask = (k < RANK)[:, None] & (v < V_DIM)[None, :]
        w = tl.load(w_head + k[:, None] * V_DIM + v[None, :], mask=w_mask, other=0)
        acc = tl.dot(joined.to(w.dtype), w, acc, input_precision="ieee" if IEEE else "tf32")
    out = (row * HEADS + head)[:, None] * V_DIM + v[None, :]
    tl.store(out_ptr + out, acc, mask=valid[:, None] & (v < V_DIM)[None, :])
