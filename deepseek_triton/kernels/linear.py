"""Linear layers on floating-point weights, with what stands around them in a decoder fused in.

One row is bound by reading the weights and takes plain multiply-adds on a few weight rows a
program, which set out before the kernel's turn comes. Several rows of a very wide layer (a head)
take the tensor cores here; everything else is cuBLAS's business, which was faster on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.launch import await_inputs, dependent_launch
from deepseek_triton.kernels.rms_norm import rms_norm
from deepseek_triton.kernels.swiglu import swiglu as gated
from deepseek_triton.kernels.tiles import dense_product

SMALL_ROWS = 64  # up to here our own kernel for layers of at least MANY_FEATURES
MANY_FEATURES = 16384


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    swiglu: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return act(norm(x) · weightᵀ + bias) + residual.

    x [M, K], weight [N, K] and the rest are of one dtype (fp32, fp16, bf16); rows contiguous.
    `norm_weight` [K] applies an RMS norm to x first. `swiglu` takes rows [0, N/2) of the weight as
    gate and [N/2, N) as up (arXiv 2002.05202): silu(gate) · up, [M, N/2]. `residual` and `out` have
    the result's shape and may be one tensor. Sums are float32; results depend on M's tile alone.
    """
    rows, width = x.shape
    features = weight.shape[0] // 2 if swiglu else weight.shape[0]
    if out is None:
        out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    if rows > 1 and norm_weight is not None:
        x, norm_weight = rms_norm(x, norm_weight, eps), None
    if rows > 1 and (rows > SMALL_ROWS or features < MANY_FEATURES or swiglu):
        return _cublas(x, weight, bias, residual, swiglu, out)
    tile = _tile(rows, width, x.dtype)
    kernel, options = _few_rows, {"BLOCK_M": tile.block_m, "IEEE": x.dtype == torch.float32}
    if rows == 1:
        kernel, options = _gemv, {"norm_ptr": norm_weight, "eps": eps, "SWIGLU": swiglu}
    kernel[(triton.cdiv(features, tile.block_n),)](
        x, weight, bias, residual, out, rows, features, x.stride(0), out.stride(0),
        residual.stride(0) if residual is not None else 0,
        K=width, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, STAGES=tile.stages,
        num_warps=tile.warps, **options, **dependent_launch(x),
    )  # fmt: skip
    return out


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    swiglu: bool = False,
) -> torch.Tensor:
    """Compute `linear` in float64 and round once: returns x's dtype."""
    wide = x.double()
    if norm_weight is not None:
        wide = torch.nn.functional.rms_norm(wide, (wide.shape[1],), norm_weight.double(), eps)
    y = wide @ weight.double().T
    if bias is not None:
        y += bias.double()
    if swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    if residual is not None:
        y += residual.double()
    return y.to(x.dtype)


@dataclass(frozen=True)
class _Tile:
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def _tile(rows: int, width: int, dtype: torch.dtype) -> _Tile:
    """Choose tiles that keep enough bytes in flight."""
    whole = max(16, triton.next_power_of_2(width))
    if rows == 1:
        return _Tile(1, 4, whole, 8, 3) if width <= 2048 else _Tile(1, 4, 1024, 4, 3)
    block_m = max(16, triton.next_power_of_2(rows))
    if dtype == torch.float32:
        return _Tile(block_m, 16, min(whole, 32), 4, 2)
    return _Tile(block_m, 128, min(whole, 128), 4, 3)


def _cublas(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    swiglu: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    if swiglu:
        gated(torch.nn.functional.linear(x, weight, bias), out=out)
        return out if residual is None else out.add_(residual)
    if residual is None and bias is None:
        return torch.mm(x, weight.T, out=out)
    if residual is None:
        return torch.addmm(bias, x, weight.T, out=out)
    torch.addmm(residual, x, weight.T, out=out)
    return out if bias is None else out.add_(bias)


@triton.jit
def _norm_tile(norm_ptr, k, K: tl.constexpr):
    """Return the norm's weights at k [BLOCK_K] in float32; 1 without a norm."""
    if norm_ptr is None:
        return tl.full(k.shape, 1.0, tl.float32)
    else:
        return tl.load(norm_ptr + k, mask=k < K, other=0).to(tl.float32)


@triton.jit
def _residual(residual_ptr, n, valid):
    """Return the residual at n in float32, or 0; sent for before the product, which hides it."""
    if residual_ptr is None:
        return tl.zeros(n.shape, tl.float32)
    else:
        return tl.load(residual_ptr + n, mask=valid, other=0).to(tl.float32)


@triton.jit
def _gemv(
    x_ptr, w_ptr, bias_ptr, residual_ptr, out_ptr,
    rows, features, x_stride, out_stride, residual_stride, norm_ptr, eps,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SWIGLU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of x: program i owns BLOCK_N results. The norm's scale is applied to the sums."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = n < features
    w_rows = w_ptr + n.to(tl.int64)[:, None] * K
    up_rows = w_rows + features.to(tl.int64) * K if SWIGLU else w_rows
    k = tl.arange(0, BLOCK_K)
    if BLOCK_K >= K:  # all weights are on their way before the wait
        mask = valid[:, None] & (k < K)[None, :]
        w = tl.load(w_rows + k[None, :], mask=mask, other=0)
        up = tl.load(up_rows + k[None, :], mask=mask, other=0) if SWIGLU else w
        norm = _norm_tile(norm_ptr, k, K)
        await_inputs(PDL)
        x = tl.load(x_ptr + k, mask=k < K, other=0).to(tl.float32)
        residual = _residual(residual_ptr, n, valid)
        scaled = (x * norm)[None, :]
        squares = x * x
        acc = w.to(tl.float32) * scaled
        acc_up = up.to(tl.float32) * scaled if SWIGLU else acc
    else:
        await_inputs(PDL)
        residual = _residual(residual_ptr, n, valid)
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        squares = tl.zeros([BLOCK_K], tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            at = start + k
            mask = valid[:, None] & (at < K)[None, :]
            x = tl.load(x_ptr + at, mask=at < K, other=0).to(tl.float32)
            scaled = (x * _norm_tile(norm_ptr, at, K))[None, :]
            squares += x * x
            acc += tl.load(w_rows + at[None, :], mask=mask, other=0).to(tl.float32) * scaled
            if SWIGLU:
                acc_up += tl.load(up_rows + at[None, :], mask=mask, other=0).to(tl.float32) * scaled
    scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps) if norm_ptr is not None else 1.0
    y = tl.sum(acc, axis=1) * scale
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=valid, other=0).to(tl.float32)
    if SWIGLU:
        up_sum = tl.sum(acc_up, axis=1) * scale
        if bias_ptr is not None:
            up_sum += tl.load(bias_ptr + features + n, mask=valid, other=0).to(tl.float32)
        y = y * tl.sigmoid(y) * up_sum
    tl.store(out_ptr + n, y + residual, mask=valid)


@triton.jit
def _few_rows(
    x_ptr, w_ptr, bias_ptr, residual_ptr, out_ptr,
    rows, features, x_stride, out_stride, residual_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M rows of x: program i owns BLOCK_N columns of the result."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    valid_n = n < features
    valid_m = m < rows
    await_inputs(PDL)
    acc = dense_product(
        x_ptr + m * x_stride, valid_m, w_ptr + n.to(tl.int64) * K, valid_n,
        K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, IEEE,
    )  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=valid_n, other=0).to(tl.float32)[None, :]
    mask = valid_m[:, None] & valid_n[None, :]
    if residual_ptr is not None:
        at = residual_ptr + m[:, None] * residual_stride + n[None, :]
        acc += tl.load(at, mask=mask, other=0).to(tl.float32)
    tl.store(out_ptr + m[:, None] * out_stride + n[None, :], acc, mask=mask)
