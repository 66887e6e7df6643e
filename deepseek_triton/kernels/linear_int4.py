"""Linear layers on INT4 weights (W4A16): dequantised in registers, multiplied on tensor cores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.int4_tensor import Int4Tensor
from deepseek_triton.kernels.launch import await_inputs, dependent_launch
from deepseek_triton.kernels.linear import linear_reference
from deepseek_triton.kernels.tiles import int4_product


def linear_int4(
    x: torch.Tensor,
    weight: Int4Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x · weightᵀ + bias + residual: [M, N] in x's dtype.

    x [M, K] and the scales are of one dtype; rows of x, `residual` and `out` contiguous, the last
    two may be one tensor. Sums are float32.
    """
    rows, width = x.shape
    features = weight.shape[0]
    if out is None:
        out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    block_m, block_n, warps, stages = _tile(rows, features, x.dtype)
    _linear_int4[(triton.cdiv(features, block_n), triton.cdiv(rows, block_m))](
        x, weight.codes, weight.scales, weight.zeros, bias, residual, out,
        rows, features, x.stride(0), out.stride(0),
        residual.stride(0) if residual is not None else 0,
        K=width, BLOCK_M=block_m, BLOCK_N=block_n, STAGES=stages, GROUP=weight.group_size,
        ASM=x.is_cuda and x.dtype != torch.float32, IEEE=x.dtype == torch.float32,
        num_warps=warps, **dependent_launch(x),
    )  # fmt: skip
    return out


def linear_int4_reference(
    x: torch.Tensor,
    weight: Int4Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `linear_int4` in float64 on dequantised weights, rounded once."""
    return linear_reference(x, weight.dense(), bias, residual=residual)


def _tile(rows: int, features: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return (rows of x, rows of the weight, warps, stages) of a program."""
    if dtype == torch.float32:
        return 16, 16, 4, 2
    if rows <= 64:
        return max(16, triton.next_power_of_2(rows)), 64, 4, 4
    return 128, 128, 8, 3


@triton.jit
def _linear_int4(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, out_ptr,
    rows, features, x_stride, out_stride, residual_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, ASM: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid_n = n < features
    valid_m = m < rows
    await_inputs(PDL)
    acc = int4_product(
        x_ptr + m.to(tl.int64) * x_stride, valid_m,
        codes_ptr + n.to(tl.int64) * ((K + 127) // 128 * 32), valid_n,
        scales_ptr + n, zeros_ptr + n if zeros_ptr is not None else None, features,
        K, BLOCK_M, BLOCK_N, STAGES, GROUP, ASM, IEEE,
    ).T  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=valid_n, other=0).to(tl.float32)[None, :]
    mask = valid_m[:, None] & valid_n[None, :]
    at = m.to(tl.int64)[:, None]
    if residual_ptr is not None:
        here = residual_ptr + at * residual_stride + n[None, :]
        acc += tl.load(here, mask=mask, other=0).to(tl.float32)
    tl.store(out_ptr + at * out_stride + n[None, :], acc, mask=mask)
