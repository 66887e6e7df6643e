"""INT4 products for a single token: plain multiply-adds, each code read once.

What bounds them is instructions, so a code costs two and a half: in a shifted word each second
nibble lies where a float's mantissa has units of 1, and one logical operation makes it the number
base + code. A group's sum is then Σ (base + code) · x − Σ base · x − zero point · Σ x, times its
scale; the last two sums are those of x alone and serve all rows of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.int4_tensor import Int4Tensor
from deepseek_triton.kernels.launch import await_inputs, dependent_launch

GROUP_SIZES = (64, 128)
_CHUNK = tl.constexpr(16)  # blocks of 128 columns at a time: 2,048 of K
_ROWS = 4  # of codes that a program holds: x is made ready once for all of them
# The float whose mantissa has units of 1 at bit 12 or 16, and its value.
_MAGIC_12 = tl.constexpr(0x45000000)
_MAGIC_16 = tl.constexpr(0x43000000)
_BASE_12 = tl.constexpr(2048.0)
_BASE_16 = tl.constexpr(128.0)


def linear_int4_one(
    x: torch.Tensor,
    weight: Int4Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x · weightᵀ + bias + residual of one row x [1, K]: [1, N] in x's dtype.

    As linear_int4.linear_int4, for the groups of GROUP_SIZES.
    """
    features, width = weight.shape
    if out is None:
        out = torch.empty(1, features, dtype=x.dtype, device=x.device)
    _linear_one[(triton.cdiv(features, _ROWS),)](
        x, weight.codes, weight.scales, weight.zeros, bias, residual, out, features,
        K=width, GROUP=weight.group_size, ROWS=_ROWS, BASE=_base(x), ASM=x.is_cuda, num_warps=1,
        **dependent_launch(x),
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

    As experts.experts, for the groups of GROUP_SIZES.
    """
    width, hidden_size = down.shape[1:]
    pairs, pdl = ids.numel(), dependent_launch(x)
    if out is None:
        out = torch.empty_like(x)
    hidden = torch.empty(pairs, hidden_size, dtype=x.dtype, device=x.device)
    _gate_up_one[(triton.cdiv(2 * hidden_size, _ROWS), pairs)](
        x, ids, gate_up.codes, gate_up.scales, gate_up.zeros, hidden, hidden_size,
        K=width, GROUP=gate_up.group_size, ROWS=_ROWS, BASE=_base(x), ASM=x.is_cuda,
        num_warps=1, **pdl,
    )  # fmt: skip
    block_p = triton.next_power_of_2(pairs)
    _down_one[(triton.cdiv(width, _ROWS),)](
        hidden, ids, weights, down.codes, down.scales, down.zeros, residual, out, width,
        K=hidden_size, GROUP=down.group_size, PAIRS=pairs, BLOCK_P=block_p, ROWS=_ROWS,
        BASE=_base(x), ASM=x.is_cuda, num_warps=min(8, block_p), **pdl,
    )  # fmt: skip
    return out


def _base(x: torch.Tensor) -> float:
    """What an Int4Tensor's zero points hold besides themselves."""
    return 1024.0 if x.dtype == torch.float16 else 128.0


@triton.jit
def _columns(x_rows, block, K: tl.constexpr, QUARTER: tl.constexpr):
    """Return even and odd columns [P, CHUNK, 16] of a quarter of each block, float32."""
    k = block[None, :, None] * 128 + QUARTER * 32 + tl.arange(0, 32)[None, None, :]
    x = tl.load(x_rows[:, None, None] + k, mask=k < K, other=0).to(tl.float32)
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 16, 2]))


@triton.jit
def _nibbles(words, LEFT: tl.constexpr, RIGHT: tl.constexpr, ASM: tl.constexpr):
    """Return nibbles 12 and 16 of words shifted left or right, as base + code."""
    shifted = (words << LEFT) >> RIGHT  # one of the two is 0
    if ASM:  # (a & b) | c in one instruction, which the compiler does not find
        low = tl.inline_asm_elementwise(
            "{ .reg .b32 m; mov.b32 m, 0x0000f000; lop3.b32 $0, $1, m, 0x45000000, 0xea; }",
            "=r,r", [shifted], tl.int32, True, 1,
        )  # fmt: skip
        high = tl.inline_asm_elementwise(
            "{ .reg .b32 m; mov.b32 m, 0x000f0000; lop3.b32 $0, $1, m, 0x43000000, 0xea; }",
            "=r,r", [shifted], tl.int32, True, 1,
        )  # fmt: skip
    else:
        low = (shifted & 0xF000) | _MAGIC_12
        high = (shifted & 0xF0000) | _MAGIC_16
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def _table(table_ptr, at_row, block, stride, K: tl.constexpr, GROUP: tl.constexpr,
           HALF: tl.constexpr):  # fmt: skip
    """Return the scales (or zero points) [P, CHUNK, 1] of one row, of the group of each half."""
    group = tl.minimum((block * 128 + HALF * 64) // GROUP, (K - 1) // GROUP)
    return tl.load(table_ptr + at_row[:, None, None] + (group * stride)[None, :, None]).to(
        tl.float32
    )


@triton.jit
def _scaled(
    total, ones, offset, weights, table, zeros_ptr, at_row, block, stride,
    K: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BASE: tl.constexpr,
):  # fmt: skip
    """Return the share [P, CHUNK, 16] of one row: its zero points taken off, scaled, weighted.

    `offset` is what zero points of 8 add to `total`.
    """
    scale = _table(table, at_row, block, stride, K, GROUP, HALF) * weights[:, None, None]
    sums = total - offset
    if zeros_ptr is not None:
        zero = _table(zeros_ptr, at_row, block, stride, K, GROUP, HALF) - (BASE + 8.0)
        sums -= zero * ones
    return sums * scale


@triton.jit
def _products(
    x_rows, codes_ptr, scales_ptr, zeros_ptr, row_base, table_base, n0, features, weights,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BASE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Return Σ over P of weights [P] · rows n0 … of P matrices · their x: [ROWS].

    x_rows [P] point at rows of K numbers, row_base [P] is the first row of each matrix and
    table_base [P] where its scales begin.
    """
    blocks: tl.constexpr = (K + 127) // 128
    word_ptr = codes_ptr.to(tl.pointer_type(tl.int32))
    index = tl.arange(0, ROWS)
    acc = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, blocks, _CHUNK):
        block = start + tl.arange(0, _CHUNK)
        at = block[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
        inside = (block < blocks)[None, :, None]
        e0, o0 = _columns(x_rows, block, K, 0)
        e1, o1 = _columns(x_rows, block, K, 1)
        e2, o2 = _columns(x_rows, block, K, 2)
        e3, o3 = _columns(x_rows, block, K, 3)
        ones_a, ones_b = e0 + e1 + o0 + o1, e2 + e3 + o2 + o3
        offset_a = (_BASE_12 + 8.0) * (e0 + o0) + (_BASE_16 + 8.0) * (e1 + o1)
        offset_b = (_BASE_12 + 8.0) * (e2 + o2) + (_BASE_16 + 8.0) * (e3 + o3)
        for i in tl.static_range(ROWS):
            n = tl.minimum(n0 + i, features - 1)  # rows beyond are not stored
            row = (row_base + n)[:, None, None] * (blocks * 16)
            words = tl.load(word_ptr + row + at, mask=inside, other=0)
            n0_, n1_ = _nibbles(words, 12, 0, ASM)
            n2_, n3_ = _nibbles(words, 4, 0, ASM)
            n4_, n5_ = _nibbles(words, 0, 4, ASM)
            n6_, n7_ = _nibbles(words, 0, 12, ASM)
            total_a = n0_ * e0 + n1_ * e1 + n4_ * o0 + n5_ * o1
            total_b = n2_ * e2 + n3_ * e3 + n6_ * o2 + n7_ * o3
            at_row = table_base + n
            if GROUP == 128:
                part = _scaled(
                    total_a + total_b, ones_a + ones_b, offset_a + offset_b, weights, scales_ptr,
                    zeros_ptr, at_row, block, features, K, GROUP, 0, BASE,
                )  # fmt: skip
            else:
                part = _scaled(
                    total_a, ones_a, offset_a, weights, scales_ptr, zeros_ptr,
                    at_row, block, features, K, GROUP, 0, BASE,
                )  # fmt: skip
                part += _scaled(
                    total_b, ones_b, offset_b, weights, scales_ptr, zeros_ptr,
                    at_row, block, features, K, GROUP, 1, BASE,
                )  # fmt: skip
            y = tl.sum(tl.reshape(part, [part.numel]), axis=0)
            acc = tl.where(index == i, acc + y, acc)
    return acc


@triton.jit
def _linear_one(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, out_ptr, features,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BASE: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n0 = tl.program_id(0) * ROWS
    one = tl.arange(0, 1)
    await_inputs(PDL)
    y = _products(
        x_ptr + one, codes_ptr, scales_ptr, zeros_ptr, one.to(tl.int64), one.to(tl.int64),
        n0, features, one + 1.0, K, GROUP, ROWS, BASE, ASM,
    )  # fmt: skip
    n = n0 + tl.arange(0, ROWS)
    valid = n < features
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=valid, other=0).to(tl.float32)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + n, mask=valid, other=0).to(tl.float32)
    tl.store(out_ptr + n, y, mask=valid)


@triton.jit
def _gate_up_one(
    x_ptr, ids_ptr, codes_ptr, scales_ptr, zeros_ptr, hidden_ptr, hidden_size,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BASE: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS / 2 hidden units of one of the token's experts."""
    pair = tl.program_id(1)
    one = tl.arange(0, 1)
    features = 2 * hidden_size
    await_inputs(PDL)
    expert = tl.load(ids_ptr + pair + one).to(tl.int64)
    y = _products(
        x_ptr + one, codes_ptr, scales_ptr, zeros_ptr, expert * features,
        expert * features * ((K + GROUP - 1) // GROUP), tl.program_id(0) * ROWS, features,
        one + 1.0, K, GROUP, ROWS, BASE, ASM,
    )  # fmt: skip
    gate, up = tl.split(tl.reshape(y, [ROWS // 2, 2]))
    unit = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    hidden = gate * tl.sigmoid(gate) * up
    tl.store(hidden_ptr + pair * hidden_size + unit, hidden, mask=unit < hidden_size)


@triton.jit
def _down_one(
    hidden_ptr, ids_ptr, weights_ptr, codes_ptr, scales_ptr, zeros_ptr, residual_ptr, out_ptr,
    features,
    K: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr,
    ROWS: tl.constexpr, BASE: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS results, summed over all of the token's experts."""
    n0 = tl.program_id(0) * ROWS
    pair = tl.arange(0, BLOCK_P)
    await_inputs(PDL)
    real = pair < PAIRS
    expert = tl.load(ids_ptr + pair, mask=real, other=0).to(tl.int64)
    weights = tl.load(weights_ptr + pair, mask=real, other=0)
    hidden_rows = hidden_ptr + tl.where(real, pair, 0) * K
    y = _products(
        hidden_rows, codes_ptr, scales_ptr, zeros_ptr, expert * features,
        expert * features * ((K + GROUP - 1) // GROUP), n0, features, weights,
        K, GROUP, ROWS, BASE, ASM,
    )  # fmt: skip
    n = n0 + tl.arange(0, ROWS)
    valid = n < features
    if residual_ptr is not None:
        y += tl.load(residual_ptr + n, mask=valid, other=0).to(tl.float32)
    tl.store(out_ptr + n, y, mask=valid)
