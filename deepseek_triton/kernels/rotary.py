"""Rotary position embedding (arXiv 2104.09864), alone and as a part of other kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.launch import await_inputs, dependent_launch

_TILE = 2048


def rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn each pair of dimensions of x [T, H, R] by its angle, the same for all heads: [T, H, R].

    cos, sin [T, R] float32, contiguous, each pair's angle twice, any factor of the rope scaling in
    them. Pairs are (2i, 2i + 1) if `interleaved`, else (i, i + R/2). x and `out` may be views whose
    last dimension is contiguous; `out` may be x itself, which is then turned in place.
    """
    tokens, heads, width = x.shape
    if out is None:
        out = torch.empty(tokens, heads, width, dtype=x.dtype, device=x.device)
    if tokens:
        block_r = triton.next_power_of_2(width)
        block_h = min(triton.next_power_of_2(heads), max(1, _TILE // block_r))
        _rotary[(tokens, triton.cdiv(heads, block_h))](
            x, cos, sin, out, heads,
            x.stride(0), x.stride(1), out.stride(0), out.stride(1),
            ROPE=width, BLOCK_R=block_r, BLOCK_H=block_h, INTERLEAVED=interleaved,
            **dependent_launch(x),
        )  # fmt: skip
    return out


def rotary_reference(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """Compute `rotary` in float64 and round once."""
    wide, cos, sin = x.double(), cos.double()[:, None], sin.double()[:, None]
    if interleaved:
        turned = torch.stack((-wide[..., 1::2], wide[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    return (wide * cos + turned * sin).to(x.dtype)


@triton.jit
def rotated(
    x_ptr, cos_ptr, sin_ptr, r, valid, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Return the vectors at x_ptr [..., 1] turned, [..., BLOCK_R] float32.

    Angles are at cos_ptr, sin_ptr [..., 1]; r [1, BLOCK_R] is the dimension; each
    value's partner is loaded a second time.
    """
    if INTERLEAVED:
        partner = r ^ 1
        first = (r & 1) == 0
    else:
        first = r < ROPE // 2
        partner = tl.where(first, r + ROPE // 2, r - ROPE // 2)
    x = tl.load(x_ptr + r, mask=valid, other=0).to(tl.float32)
    other = tl.load(x_ptr + partner, mask=valid, other=0).to(tl.float32)
    cos = tl.load(cos_ptr + r, mask=valid, other=0)
    sin = tl.load(sin_ptr + r, mask=valid, other=0)
    return x * cos + tl.where(first, -other, other) * sin


@triton.jit
def _rotary(
    x_ptr, cos_ptr, sin_ptr, out_ptr, heads,
    x_token, x_head, out_token, out_head,
    ROPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
    INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, i) owns BLOCK_H heads of token t."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    r = tl.arange(0, BLOCK_R)[None, :]
    valid = (h < heads) & (r < ROPE)
    await_inputs(PDL)
    angle = token * ROPE
    y = rotated(
        x_ptr + token * x_token + h * x_head, cos_ptr + angle, sin_ptr + angle,
        r, valid, ROPE, INTERLEAVED,
    )  # fmt: skip
    tl.debug_barrier()  # in place: all values are read before any is overwritten
    tl.store(out_ptr + token * out_token + h * out_head + r, y, mask=valid)
