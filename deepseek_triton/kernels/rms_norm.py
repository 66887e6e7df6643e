"""Root-mean-square norm, with the residual addition before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.launch import await_inputs, dependent_launch

_MAX_WARPS = 8


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight (arXiv 1910.07467) of rows x [T, D].

    Any float dtype, one for all; rows contiguous; computed in float32. `out` [T, D] may be x.
    """
    return _launch(x, weight, eps, None, out)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rms_norm` of x + residual, and that sum: both [T, D] of x's dtype.

    The norm is that of the sum before it is rounded.
    """
    return _launch(x, weight, eps, residual, None)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `rms_norm` in float64 and round once."""
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.double()).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `add_rms_norm` in float64 and round once."""
    total = x.double() + residual.double()
    return rms_norm_reference(total, weight, eps).to(x.dtype), total.to(x.dtype)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    if out is None:
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(out)
    if rows:
        block = triton.next_power_of_2(width)
        _rms_norm[(rows,)](
            x, weight, residual, out, total,
            x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0), eps,
            WIDTH=width, BLOCK=block, num_warps=max(1, min(_MAX_WARPS, block // 512)),
            **dependent_launch(x),
        )  # fmt: skip
    return out, total


@triton.jit
def _rms_norm(
    x_ptr, weight_ptr, residual_ptr, out_ptr, total_ptr,
    x_stride, residual_stride, out_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i owns row i."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    valid = d < WIDTH
    weight = tl.load(weight_ptr + d, mask=valid, other=0).to(tl.float32)
    await_inputs(PDL)
    x = tl.load(x_ptr + row * x_stride + d, mask=valid, other=0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * residual_stride + d, mask=valid, other=0).to(tl.float32)
        tl.store(total_ptr + row * WIDTH + d, x, mask=valid)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    tl.store(out_ptr + row * out_stride + d, x * scale * weight, mask=valid)
