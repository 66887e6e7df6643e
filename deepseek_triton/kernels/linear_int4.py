"""Linear layers on INT4 weights (W4A16): dequantised in registers, multiplied on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.int4_tensor import Int4Tensor
from deepseek_triton.kernels.launch import await_inputs, dependent_launch
from deepseek_triton.kernels.linear import linear_reference
from deepseek_triton.kernels.rms_norm import rms_norm
from deepseek_triton.kernels.tiles import int4_product

_MANY_ROWS = 64  # beyond, arithmetic counts: weights are scaled, and rounded, before the product


def linear_int4(
    x: torch.Tensor,
    weight: Int4Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return norm(x) · weightᵀ + bias + residual: [M, N] in x's dtype.

    x [M, K] and the scales are of one dtype; rows of x, `residual` and `out` contiguous, the last
    two may be one tensor. `norm_weight` [K] applies an RMS norm to x first. Sums are float32.
    """
    rows, width = x.shape
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    features = weight.shape[0]
    if out is None:
        out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    tile = _tile(rows, x.dtype)
    _linear_int4[(triton.cdiv(features, tile.block_n), triton.cdiv(rows, tile.block_m))](
        x, weight.codes, weight.scales, weight.zeros, bias, residual, out,
        rows, features, x.stride(0), out.stride(0),
        residual.stride(0) if residual is not None else 0,
        K=width, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, STAGES=tile.stages,
        GROUP=weight.group_size, ASM=x.is_cuda and x.dtype != torch.float32,
        IEEE=x.dtype == torch.float32, ROUND=rows > _MANY_ROWS, num_warps=tile.warps,
        **dependent_launch(x),
    )  # fmt: skip
    return out


def linear_int4_reference(
    x: torch.Tensor,
    weight: Int4Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `linear_int4` in float64 on dequantised weights, rounded once."""
    return linear_reference(
        x, weight.dense(), bias, norm_weight=norm_weight, eps=eps, residual=residual
    )


@dataclass(frozen=True)
class Int4Tile:
    """Rows of x and of the weight that a program takes."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def _tile(rows: int, dtype: torch.dtype) -> Int4Tile:
    if dtype == torch.float32:
        return Int4Tile(16, 16, 4, 2)
    if rows <= 16:
        return Int4Tile(8 if rows <= 8 else 16, 64, 4, 5)
    if rows <= _MANY_ROWS:
        return Int4Tile(triton.next_power_of_2(rows), 64, 4, 3)
    return Int4Tile(128, 256, 8, 3)


@triton.jit
def _linear_int4(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, out_ptr,
    rows, features, x_stride, out_stride, residual_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, ASM: tl.constexpr, IEEE: tl.constexpr, ROUND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid_n = n < features
    valid_m = m < rows
    await_inputs(PDL)
    x_rows = x_ptr + m.to(tl.int64) * x_stride
    row = tl.minimum(n, features - 1)  # rows beyond are not stored
    word_rows = codes_ptr + row.to(tl.int64) * 32
    zeros = zeros_ptr + row if zeros_ptr is not None else None
    acc = int4_product(
        x_rows, valid_m, word_rows, scales_ptr + row, zeros, features,
        K, BLOCK_M, BLOCK_N, STAGES, GROUP, ASM, IEEE, ROUND,
    ).T  # fmt: skip
    _store(
        acc, m, n, valid_m, valid_n, bias_ptr, residual_ptr, out_ptr, out_stride, residual_stride
    )


@triton.jit
def _store(
    acc, m, n, valid_m, valid_n, bias_ptr, residual_ptr, out_ptr, out_stride, residual_stride
):
    """Add bias and residual to acc [BLOCK_M, BLOCK_N] and store it."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=valid_n, other=0).to(tl.float32)[None, :]
    mask = valid_m[:, None] & valid_n[None, :]
    at = m.to(tl.int64)[:, None]
    if residual_ptr is not None:
        here = residual_ptr + at * residual_stride + n[None, :]
        acc += tl.load(here, mask=mask, other=0).to(tl.float32)
    tl.store(out_ptr + at * out_stride + n[None, :], acc, mask=mask)
