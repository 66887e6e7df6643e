"""Products of a tile of rows with a tile of weight rows, floating-point or INT4: device functions.

INT4 weights lie as kernels read them (`Int4Tensor` in int4_tensor.py): in each 128 columns of K,
16-bit word j of a row holds columns j, 32 + j, 64 + j and 96 + j from its lowest nibble up; rows of
these columns lie side by side, 64 bytes each. A register of two words then gives two neighbouring
columns of each quarter at a time, and each quarter meets contiguous columns of x.
"""

from __future__ import annotations

import triton
import triton.language as tl

# (nibble | magic) is magic's value plus the code, exactly: 128 + code in bf16, 1,024 + in fp16.
_SPREAD_BF16 = tl.constexpr(
    """
    {
    .reg .b32 a, b, c;
    shr.u32 a, $4, 4;
    shr.u32 b, $4, 8;
    shr.u32 c, $4, 12;
    lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $1, a, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $2, b, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $3, c, 0x000f000f, 0x43004300, 0xea;
    }
    """
)
_SPREAD_FP16 = tl.constexpr(_SPREAD_BF16.value.replace("0x43004300", "0x64006400"))


@triton.jit
def dense_product(
    a_rows, valid_m, w_rows, valid_n,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Return a · wᵀ [BLOCK_M, BLOCK_N] float32; a_rows and w_rows point at rows of K elements."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        if K % BLOCK_K == 0:
            a = tl.load(a_rows[:, None] + k[None, :], mask=valid_m[:, None], other=0)
            w = tl.load(w_rows[:, None] + k[None, :], mask=valid_n[:, None], other=0)
        else:
            inside = (k < K)[None, :]
            a = tl.load(a_rows[:, None] + k[None, :], mask=valid_m[:, None] & inside, other=0)
            w = tl.load(w_rows[:, None] + k[None, :], mask=valid_n[:, None] & inside, other=0)
        acc = tl.dot(a, w.T, acc, input_precision=precision)
    return acc


@triton.jit
def described_product(
    a_rows, valid_m, descriptor, row,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """As `dense_product`, with weight rows row … fetched by the tensor memory unit.

    `descriptor` is that of the weights with tiles of [BLOCK_N, BLOCK_K]; rows and columns beyond
    the weights' end count as 0.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        inside = valid_m[:, None]
        if K % BLOCK_K != 0:
            inside = inside & (k < K)[None, :]
        a = tl.load(a_rows[:, None] + k[None, :], mask=inside, other=0)
        acc = tl.dot(a, descriptor.load([row, start]).T, acc)
    return acc


@triton.jit
def spread(words, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Return the four nibbles of int16 words, lowest first, as DTYPE plus 128 (fp16: 1,024)."""
    if ASM and DTYPE == tl.bfloat16:
        q0, q1, q2, q3 = tl.inline_asm_elementwise(
            _SPREAD_BF16, "=r,=r,=r,=r,r", [words], (tl.bfloat16,) * 4, True, 2
        )
    elif ASM:
        q0, q1, q2, q3 = tl.inline_asm_elementwise(
            _SPREAD_FP16, "=r,=r,=r,=r,r", [words], (tl.float16,) * 4, True, 2
        )
    else:
        q0 = _nibble(words, 0, DTYPE)
        q1 = _nibble(words, 4, DTYPE)
        q2 = _nibble(words, 8, DTYPE)
        q3 = _nibble(words, 12, DTYPE)
    return q0, q1, q2, q3


@triton.jit
def _nibble(words, SHIFT: tl.constexpr, DTYPE: tl.constexpr):
    code = (words >> SHIFT) & 15
    magic: tl.constexpr = 0x6400 if DTYPE == tl.float16 else 0x4300
    if DTYPE == tl.float32:  # and else: the compiler looks at what follows a return
        return ((code | magic).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return (code | magic).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def _side_by_side(left, right):
    """Return [left | right] of two tensors [N, J]: a matter of register names alone."""
    both = tl.permute(tl.join(left, right), 0, 2, 1)
    return tl.reshape(both, [left.shape[0], 2 * left.shape[1]])


@triton.jit
def _columns(quarters, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Return COUNT (1, 2 or 4) quarters of 32 columns, from FIRST on, as one matrix."""
    if COUNT == 1:
        return quarters[FIRST]
    elif COUNT == 2:
        return _side_by_side(quarters[FIRST], quarters[FIRST + 1])
    else:
        left = _side_by_side(quarters[0], quarters[1])
        return _side_by_side(left, _side_by_side(quarters[2], quarters[3]))


@triton.jit
def _load_columns(a_rows, valid_m, first, K: tl.constexpr, COUNT: tl.constexpr):
    """Return columns first … first + COUNT of rows of K elements, 0 beyond K."""
    k = first + tl.arange(0, COUNT)
    inside = valid_m[:, None]
    if K % 128 != 0:
        inside = inside & (k < K)[None, :]
    return tl.load(a_rows[:, None] + k[None, :], mask=inside, other=0)


@triton.jit
def _table_row(table, block, FIRST: tl.constexpr, stride, K: tl.constexpr, GROUP: tl.constexpr):
    """Return the scales (or zero points) of the group that has column FIRST of a block."""
    group = block * (128 // GROUP) + FIRST // GROUP
    if K % 128 != 0:
        group = tl.minimum(group, (K - 1) // GROUP)
    return tl.load(table + group * stride)


@triton.jit
def _less_zeros(
    w, zeros, block, FIRST: tl.constexpr, stride, K: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Return w, as `spread` gives it, less the zero points of its group: small integers."""
    if zeros is not None:
        return w - _table_row(zeros, block, FIRST, stride, K, GROUP).to(w.dtype)[:, None]
    else:
        symmetric: tl.constexpr = 1032.0 if w.dtype == tl.float16 else 136.0
        return w - symmetric


@triton.jit
def int4_product(
    a_rows, valid_m, word_rows, scales, zeros, stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, ASM: tl.constexpr, IEEE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Return w · aᵀ [BLOCK_N, BLOCK_M] float32: weights first, so that they stay in registers.

    word_rows point at rows of packed words of the first 128 columns; `scales` and `zeros` at this
    tile's columns of group 0; matrices have `stride` rows; all must be readable. The products of a
    group's integers with a are summed in float32 and scaled there: weights are never rounded. With
    ROUND the integers are scaled instead, and rounded to a's dtype. All of K is one sum then, and
    the tensor cores need not wait for each group's; that pays from some 64 rows on.
    """
    dtype: tl.constexpr = a_rows.dtype.element_ty
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in tl.range(0, (K + 127) // 128, num_stages=STAGES):
        words = tl.load(word_rows[:, None] + (block * stride * 32 + tl.arange(0, 32))[None, :])
        q = spread(words, dtype, ASM)
        if ROUND:
            q0 = _scaled(q[0], scales, zeros, block, 0, stride, K, GROUP)
            q1 = _scaled(q[1], scales, zeros, block, 32, stride, K, GROUP)
            q2 = _scaled(q[2], scales, zeros, block, 64, stride, K, GROUP)
            q3 = _scaled(q[3], scales, zeros, block, 96, stride, K, GROUP)
            a = _load_columns(a_rows, valid_m, block * 128, K, 128)
            w = _columns((q0, q1, q2, q3), 0, 4)
            acc = tl.dot(w, a.T, acc, input_precision=precision)
        else:
            for first in tl.static_range(0, 128, GROUP):
                a = _load_columns(a_rows, valid_m, block * 128 + first, K, GROUP)
                w = _columns(q, first // 32, GROUP // 32)
                w = _less_zeros(w, zeros, block, first, stride, K, GROUP)
                part = tl.dot(w, a.T, input_precision=precision)
                acc += part * _table_row(scales, block, first, stride, K, GROUP)[:, None]
    return acc


@triton.jit
def _scaled(
    w, scales, zeros, block, FIRST: tl.constexpr, stride, K: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Return w, as `spread` gives it, as weights."""
    w = _less_zeros(w, zeros, block, FIRST, stride, K, GROUP)
    return w * _table_row(scales, block, FIRST, stride, K, GROUP).to(w.dtype)[:, None]
