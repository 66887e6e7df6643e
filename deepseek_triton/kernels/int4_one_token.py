"""INT4 products for a single token: plain multiply-adds, each code read once.

A row's sum over a group is Σ (base + code) · x − (base + zero point) · Σ x, times the group's
scale: base + code is what a nibble becomes by one logical operation (tiles.spread), exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.int4_tensor import Int4Tensor
from deepseek_triton.kernels.launch import await_inputs, dependent_launch
from deepseek_triton.kernels.tiles import spread

_ROWS = 8  # of codes that one program holds
_CHUNK = tl.constexpr(16)  # blocks of 128 columns at a time: 2,048 of K


def linear_int4_one(
    x: torch.Tensor,
    weight: Int4Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x · weightᵀ + bias + residual of one row x [1, K]: [1, N] in x's dtype.

    As linear_int4.linear_int4.
    """
    features, width = weight.shape
    if out is None:
        out = torch.empty(1, features, dtype=x.dtype, device=x.device)
    _linear_one[(triton.cdiv(features, _ROWS),)](
        x, weight.codes, weight.scales, weight.zeros, bias, residual, out, features,
        K=width, GROUP=weight.group_size, ROWS=_ROWS, ASM=_asm(x), **dependent_launch(x),
    )  # fmt: skip
    return out


def experts_int4_one(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Int4Tensor,
    down: Int4Tensor,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return residual + Σ_p weights[0, p] · expert ids[0, p] of one token x [1, D].

    As experts.experts.
    """
    width, hidden_size = down.shape[1:]
    pairs, pdl = ids.numel(), dependent_launch(x)
    if out is None:
        out = torch.empty_like(x)
    hidden = torch.empty(pairs, hidden_size, dtype=x.dtype, device=x.device)
    _gate_up_one[(triton.cdiv(2 * hidden_size, _ROWS), pairs)](
        x, ids, gate_up.codes, gate_up.scales, gate_up.zeros, hidden, hidden_size,
        K=width, GROUP=gate_up.group_size, ROWS=_ROWS, ASM=_asm(x), **pdl,
    )  # fmt: skip
    _down_one[(triton.cdiv(width, 2),)](
        hidden, ids, weights, down.codes, down.scales, down.zeros, residual, out, width,
        K=hidden_size, GROUP=down.group_size, PAIRS=pairs, ROWS=2, ASM=_asm(x),
        num_warps=2, **pdl,
    )  # fmt: skip
    return out


def _asm(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float32


@triton.jit
def _quarter(values, x_ptr, block, K: tl.constexpr, QUARTER: tl.constexpr):
    """Return values [ROWS, CHUNK, 32] times the columns they belong to, and those [CHUNK, 32]."""
    k = block[:, None] * 128 + QUARTER * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + k, mask=k < K, other=0).to(tl.float32)
    return values.to(tl.float32) * x[None, :, :], x


@triton.jit
def _group_sum(
    products, x, block, scales_ptr, zeros_ptr, at_n, valid, stride,
    QUARTER: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BASE: tl.constexpr,
):  # fmt: skip
    """Return the sums [ROWS] of groups that hold quarter QUARTER of each block, scaled."""
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    group = (block * 128 + QUARTER * 32) // GROUP
    at = group[None, :] * stride + at_n[:, None]
    mask = valid[:, None] & (group < groups)[None, :]
    scale = tl.load(scales_ptr + at, mask=mask, other=0).to(tl.float32)
    zero = tl.full(scale.shape, BASE + 8, tl.float32)
    if zeros_ptr is not None:
        zero = tl.load(zeros_ptr + at, mask=mask, other=0).to(tl.float32)
    sums = tl.sum(products, axis=2) - zero * tl.sum(x, axis=1)[None, :]
    return tl.sum(sums * scale, axis=1)


@triton.jit
def _row_sums(
    x_ptr, word_rows, scales_ptr, zeros_ptr, at_n, valid, stride,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
    FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Return the products [ROWS] of rows of codes and x [K]; FIRST: x is not awaited yet."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    base: tl.constexpr = 1024.0 if dtype == tl.float16 else 128.0
    blocks: tl.constexpr = (K + 127) // 128
    acc = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, blocks, _CHUNK):
        block = start + tl.arange(0, _CHUNK)
        at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
        mask = valid[:, None, None] & (block < blocks)[None, :, None]
        words = tl.load(word_rows[:, None, None] + at[None, :, :], mask=mask, other=0)
        if FIRST and start == 0:
            await_inputs(PDL)
        q0, q1, q2, q3 = spread(words, dtype, ASM)
        products, x = _quarter(q0, x_ptr, block, K, 0)
        if GROUP == 32:
            acc += _group_sum(
                products, x, block, scales_ptr, zeros_ptr, at_n, valid, stride, 0, K, GROUP, base
            )
        more, more_x = _quarter(q1, x_ptr, block, K, 1)
        products = more if GROUP == 32 else products + more
        x = more_x if GROUP == 32 else x + more_x
        if GROUP <= 64:
            acc += _group_sum(
                products, x, block, scales_ptr, zeros_ptr, at_n, valid, stride, 1, K, GROUP, base
            )
        more, more_x = _quarter(q2, x_ptr, block, K, 2)
        products = more if GROUP <= 64 else products + more
        x = more_x if GROUP <= 64 else x + more_x
        if GROUP == 32:
            acc += _group_sum(
                products, x, block, scales_ptr, zeros_ptr, at_n, valid, stride, 2, K, GROUP, base
            )
        more, more_x = _quarter(q3, x_ptr, block, K, 3)
        products = more if GROUP == 32 else products + more
        x = more_x if GROUP == 32 else x + more_x
        acc += _group_sum(
            products, x, block, scales_ptr, zeros_ptr, at_n, valid, stride, 3, K, GROUP, base
        )
    return acc


@triton.jit
def _linear_one(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, out_ptr, features,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = n < features
    words: tl.constexpr = (K + 127) // 128 * 32
    word_rows = codes_ptr + n.to(tl.int64) * words
    y = _row_sums(
        x_ptr, word_rows, scales_ptr, zeros_ptr, n, valid, features, K, GROUP, ROWS, ASM, True, PDL
    )
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=valid, other=0).to(tl.float32)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + n, mask=valid, other=0).to(tl.float32)
    tl.store(out_ptr + n, y, mask=valid)


@triton.jit
def _expert_rows(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, expert, n, valid, features,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Products of rows n [ROWS] of one expert's matrix and x [K]."""
    words: tl.constexpr = (K + 127) // 128 * 32
    word_rows = codes_ptr + (expert * features + n) * words
    table = expert * features * ((K + GROUP - 1) // GROUP)
    zeros = zeros_ptr + table if zeros_ptr is not None else None
    return _row_sums(
        x_ptr, word_rows, scales_ptr + table, zeros, n, valid, features,
        K, GROUP, ROWS, ASM, False, False,
    )  # fmt: skip


@triton.jit
def _gate_up_one(
    x_ptr, ids_ptr, codes_ptr, scales_ptr, zeros_ptr, hidden_ptr, hidden_size,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ROWS / 2 hidden units of one of the token's experts."""
    pair = tl.program_id(1)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    features = 2 * hidden_size
    await_inputs(PDL)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    y = _expert_rows(
        x_ptr, codes_ptr, scales_ptr, zeros_ptr, expert, n, n < features, features,
        K, GROUP, ROWS, ASM,
    )  # fmt: skip
    gate, up = tl.split(tl.reshape(y, [ROWS // 2, 2]))
    unit = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    hidden = gate * tl.sigmoid(gate) * up
    tl.store(hidden_ptr + pair * hidden_size + unit, hidden, mask=unit < hidden_size)


@triton.jit
def _down_one(
    hidden_ptr, ids_ptr, weights_ptr, codes_ptr, scales_ptr, zeros_ptr, residual_ptr, out_ptr,
    features,
    K: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS results, summed over all of the token's experts."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = n < features
    await_inputs(PDL)
    acc = tl.zeros([ROWS], tl.float32)
    for pair in tl.static_range(PAIRS):
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        acc += tl.load(weights_ptr + pair) * _expert_rows(
            hidden_ptr + pair * K, codes_ptr, scales_ptr, zeros_ptr, expert, n, valid, features,
            K, GROUP, ROWS, ASM,
        )  # fmt: skip
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + n, mask=valid, other=0).to(tl.float32)
    tl.store(out_ptr + n, acc, mask=valid)
