"""INT4 products for a single token, on the tensor cores; codes stream through registers.

A program owns eight rows, each of its warps some of their blocks of 128 columns, two at a time. A
lane fetches 16 bytes of a row: 32 codes, columns 8t … 8t + 7 of each quarter of a block. The tensor
cores want other columns in that lane, but any order of columns will do when both factors keep it:
`_as_held` renames them, and no code changes lanes. A tile of the product has sixteen rows, eight
of each block, and eight columns, four copies of x of each block. Half of it is of use.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.int4_tensor import Int4Tensor
from deepseek_triton.kernels.launch import await_and_release, await_inputs, dependent_launch
from deepseek_triton.kernels.tiles import spread

_ROWS = tl.constexpr(8)  # of a matrix that a program takes
# Warps that share a row, and how many times they take two blocks before the first is at work. All
# programs of DeepSeek-V2-Lite's experts run at once on an H200: 22 of one warp on each
# multiprocessor, or two of eight. One register set too many, and the last wait for the first.
_SHORT_ROWS, _LONG_ROWS = (2, 2), (8, 2)
_ONE_WARP_REGISTERS = 88


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
    _linear_one[(triton.cdiv(features, _ROWS.value),)](
        x, weight.codes, weight.scales, weight.zeros, bias, residual, out, features,
        K=width, **_options(x, weight, *(_SHORT_ROWS if width <= 4096 else _LONG_ROWS)),
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
    pairs = ids.numel()
    if out is None:
        out = torch.empty_like(x)
    hidden = torch.empty(pairs, hidden_size, dtype=x.dtype, device=x.device)
    _gate_up_one[(triton.cdiv(2 * hidden_size, _ROWS.value), pairs)](
        x, ids, gate_up.codes, gate_up.scales, gate_up.zeros, hidden, hidden_size,
        K=width, **_options(x, gate_up, *_SHORT_ROWS),
    )  # fmt: skip
    slots = triton.next_power_of_2(pairs)
    # Directly behind _gate_up_one: it reads ids before it waits.
    _down_one[(triton.cdiv(width, _ROWS.value),)](
        hidden, ids, weights, down.codes, down.scales, down.zeros, residual, out, width,
        K=hidden_size, PAIRS=pairs, SLOTS=slots,
        **_options(x, down, max(_LONG_ROWS[0], slots // 2), _LONG_ROWS[1]),
    )  # fmt: skip
    return out


def _options(x: torch.Tensor, matrix: Int4Tensor, warps: int, ahead: int) -> dict[str, Any]:
    """Return launch arguments: `warps` take two blocks at a time, with `ahead` times on the way."""
    options = {
        "GROUP": matrix.group_size,
        "STEP": warps,
        "AHEAD": ahead,
        "ASM": x.is_cuda and x.dtype != torch.float32,
        "num_warps": warps,
        **dependent_launch(x),
    }
    if warps == 1 and x.dtype != torch.float32 and matrix.group_size > 32:  # others would spill
        options["maxnreg"] = _ONE_WARP_REGISTERS
    return options


@triton.jit
def _as_held(tile):
    """Rename the columns of a tile [S, M, 32]: eight neighbours of a lane become its share.

    The tensor cores give a lane columns 4t … 4t + 3 of each half: as 16-bit pairs, the first of
    both halves to one instruction and the second to the next.
    """
    tile = tl.reshape(tile, [tile.shape[0], tile.shape[1], 4, 2, 2, 2])
    return tl.reshape(tl.permute(tile, 0, 1, 4, 2, 3, 5), [tile.shape[0], tile.shape[1], 32])


@triton.jit
def _start(ids_ptr, codes_ptr, n0, features, K: tl.constexpr, PAIRS: tl.constexpr,
           GROUP: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """Return where a program's first chunk lies; SPLIT blocks of each pair make a chunk.

    Pointers to its words [8, 2 · STEP, 16], offsets of its scales [4, 8, 2 · STEP], and its
    blocks [2 · STEP], those of one half of the tile after those of the other. Lanes lie along
    the words (or copies) and the rows, warps along the blocks: as the tensor cores want it.
    """
    blocks: tl.constexpr = (K + 127) // 128
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    index = tl.arange(0, 2 * STEP)
    slot = index % STEP * 2 + index // STEP
    block = slot % SPLIT
    matrix = 0
    if PAIRS > 1:
        real = slot // SPLIT < PAIRS
        matrix = tl.load(ids_ptr + slot // SPLIT, mask=real, other=0).to(tl.int64)
        block = tl.where(real, block, blocks)
    elif ids_ptr is not None:
        matrix = tl.load(ids_ptr).to(tl.int64)
    n = tl.minimum(n0 + tl.arange(0, _ROWS)[:, None], features - 1)  # not stored beyond
    words = codes_ptr.to(tl.pointer_type(tl.int32)) + matrix * features * (blocks * 16)
    words = (words + block * (features * 16))[None, :] + n * 16
    words = words[:, :, None] + tl.arange(0, 16)[None, None, :]
    table = ((matrix * groups + block * (128 // GROUP)) * features)[None, :] + n
    return words, table[None, :, :] + tl.zeros([4, 1, 1], tl.int32), block


@triton.jit
def _load(
    start, scales_ptr, zeros_ptr, chunk, features,
    K: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Return a chunk's words, and the scales and zero points of each of its blocks' groups."""
    words, table, block = start
    parts: tl.constexpr = 128 // GROUP
    block += chunk * SPLIT
    there = (block < (K + 127) // 128)[None, :, None]
    codes = tl.load(words + chunk * (SPLIT * 16) * features, mask=there)
    scales, zeros = (), ()  # type: Any, Any
    for part in tl.static_range(parts):
        inside = (block * parts + part < (K + GROUP - 1) // GROUP)[None, None, :]
        at = table + (chunk * (SPLIT * parts) + part) * features
        scales = scales + (tl.load(scales_ptr + at, mask=inside, other=0),)
        if zeros_ptr is not None:
            zeros = zeros + (tl.load(zeros_ptr + at, mask=inside, other=0),)
    return codes, scales, zeros


@triton.jit
def _of_rows(table, COLUMNS: tl.constexpr):
    """Return what a lane loaded for its rows, [4, 8, 2 · STEP], as a tile [STEP, 16, COLUMNS].

    COLUMNS 8: a tile of the product, 32: one of codes as `_as_held` leaves it.
    """
    step: tl.constexpr = table.shape[2] // 2
    each: tl.constexpr = 2 if COLUMNS == 8 else 4
    table = tl.permute(tl.reshape(table, [4, 8, 2, step]), 3, 2, 1, 0)
    table = tl.reshape(table, [step, 16, 1, 4, 1])
    table = tl.broadcast_to(table, [step, 16, COLUMNS // (4 * each), 4, each])
    return tl.reshape(table, [step, 16, COLUMNS])


@triton.jit
def _load_x(x_rows, block, K: tl.constexpr):
    """Return the quarters of x [8, STEP, 16 or 32] that meet a chunk, as 32-bit words.

    x_rows and block [8, STEP] are those of each column of the tile.
    """
    each: tl.constexpr = 32 // x_rows.dtype.scalar.element_ty.primitive_bitwidth
    rows = x_rows.to(tl.pointer_type(tl.int32))[:, :, None]
    x = ()  # type: Any
    for q in tl.static_range(4):
        at = ((block * 128 + q * 32) // each)[:, :, None] + tl.arange(0, 32 // each)[None, None, :]
        if K % 128 == 0:
            x = x + (tl.load(rows + at),)
        else:
            x = x + (tl.load(rows + at, mask=at < K // each, other=0),)
    return x


@triton.jit
def _halves(words):
    """Return the 16-bit halves of words […, N] as neighbours […, 2 · N]: no register changes."""
    both = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
    return tl.reshape(both, [words.shape[0], words.shape[1], 2 * words.shape[2]])


@triton.jit
def _products(sums, loaded, x, DTYPE: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr):
    """Return sums [STEP, 16, 8] plus those of a chunk that `_load` and `_load_x` returned."""
    codes, scales, zeros = loaded
    precision: tl.constexpr = "ieee" if DTYPE == tl.float32 else "tf32"
    symmetric: tl.constexpr = 1032.0 if DTYPE == tl.float16 else 136.0
    step: tl.constexpr = codes.shape[1] // 2
    parts: tl.constexpr = 128 // GROUP
    words = tl.permute(tl.reshape(_halves(codes), [8, 2, step, 32]), 2, 1, 0, 3)
    quarters = spread(tl.reshape(words, [step, 16, 32]), DTYPE, ASM)
    for part in tl.static_range(parts):
        acc = tl.zeros([step, 16, 8], tl.float32)
        for q in tl.static_range(part * 4 // parts, (part + 1) * 4 // parts):
            columns = (x[q] if DTYPE == tl.float32 else _halves(x[q])).to(DTYPE, bitcast=True)
            columns = _as_held(tl.permute(columns, 1, 0, 2))
            w = _as_held(quarters[q])  # zero points come off exactly
            if len(zeros) > 0:
                w -= _of_rows(zeros[part].to(DTYPE), 32)
            else:
                w -= symmetric
            acc = tl.dot(w, tl.permute(columns, 0, 2, 1), acc, input_precision=precision)
        sums += acc * _of_rows(scales[part], 8)
    return sums


@triton.jit
def _sums(
    x_ptr, ids_ptr, weights_ptr, codes_ptr, scales_ptr, zeros_ptr, n0, features,
    K: tl.constexpr, PAIRS: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr,
    STEP: tl.constexpr, AHEAD: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Return rows n0 … of the pairs' matrices times their x, weighted and summed: [8] float32.

    Chunks set out AHEAD of the one at work. With PDL, the first do before the wait.
    """
    split: tl.constexpr = 2 * STEP // SLOTS
    blocks: tl.constexpr = (K + 127) // 128
    start = _start(ids_ptr, codes_ptr, n0, features, K, PAIRS, GROUP, STEP, split)
    loaded = ()  # type: Any
    for i in tl.static_range(AHEAD):
        loaded = loaded + (_load(start, scales_ptr, zeros_ptr, i, features, K, GROUP, split),)
    await_inputs(PDL)
    slot = tl.arange(0, STEP)[None, :] * 2 + tl.arange(0, 8)[:, None] // 4
    x_rows = x_ptr + tl.minimum(slot // split, PAIRS - 1) * K
    x = ()  # type: Any
    for i in tl.static_range(AHEAD):
        x = x + (_load_x(x_rows, tl.minimum(i * split + slot % split, blocks - 1), K),)
    acc = tl.zeros([STEP, 16, 8], tl.float32)
    for first in tl.range(0, (blocks + split - 1) // split, AHEAD, num_stages=1):
        next_loaded, next_x = (), ()  # type: Any, Any
        for i in tl.static_range(AHEAD):
            acc = _products(acc, loaded[i], x[i], x_ptr.dtype.element_ty, GROUP, ASM)
            chunk = first + AHEAD + i
            following = _load(start, scales_ptr, zeros_ptr, chunk, features, K, GROUP, split)
            next_loaded = next_loaded + (following,)
            block = tl.minimum(chunk * split + slot % split, blocks - 1)  # beyond, scales are 0
            next_x = next_x + (_load_x(x_rows, block, K),)
        loaded, x = next_loaded, next_x
    half = tl.arange(0, 2)[None, :, None]
    pair = (tl.arange(0, STEP)[:, None, None] * 2 + half) // split
    share = (tl.arange(0, 8)[None, None, :] // 4 == half).to(tl.float32) / 4  # of four copies
    if weights_ptr is not None:
        share *= tl.load(weights_ptr + pair, mask=pair < PAIRS, other=0)
    acc = tl.reshape(acc, [STEP, 2, 8, 8]) * share[:, :, None, :]
    return tl.sum(tl.sum(tl.sum(acc, axis=1), axis=2), axis=0)  # between warps last


@triton.jit
def _linear_one(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, out_ptr, features,
    K: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, AHEAD: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n0 = tl.program_id(0) * _ROWS
    y = _sums(
        x_ptr, None, None, codes_ptr, scales_ptr, zeros_ptr, n0, features,
        K, 1, 1, GROUP, STEP, AHEAD, ASM, PDL,
    )  # fmt: skip
    _store(y, n0, features, bias_ptr, residual_ptr, out_ptr)


@triton.jit
def _gate_up_one(
    x_ptr, ids_ptr, codes_ptr, scales_ptr, zeros_ptr, hidden_ptr, hidden_size,
    K: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, AHEAD: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Four hidden units of one of the token's experts."""
    pair = tl.program_id(1)
    await_and_release(PDL)
    y = _sums(
        x_ptr, ids_ptr + pair, None, codes_ptr, scales_ptr, zeros_ptr,
        tl.program_id(0) * _ROWS, 2 * hidden_size, K, 1, 1, GROUP, STEP, AHEAD, ASM, False,
    )  # fmt: skip
    gate, up = tl.split(tl.reshape(y, [_ROWS // 2, 2]))
    unit = tl.program_id(0) * (_ROWS // 2) + tl.arange(0, _ROWS // 2)
    hidden = gate * tl.sigmoid(gate) * up
    tl.store(hidden_ptr + pair * hidden_size + unit, hidden, mask=unit < hidden_size)


@triton.jit
def _down_one(
    hidden_ptr, ids_ptr, weights_ptr, codes_ptr, scales_ptr, zeros_ptr, residual_ptr, out_ptr,
    features,
    K: tl.constexpr, PAIRS: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr,
    STEP: tl.constexpr, AHEAD: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Eight results, summed over all of the token's experts."""
    n0 = tl.program_id(0) * _ROWS
    y = _sums(
        hidden_ptr, ids_ptr, weights_ptr, codes_ptr, scales_ptr, zeros_ptr, n0, features,
        K, PAIRS, SLOTS, GROUP, STEP, AHEAD, ASM, PDL,
    )  # fmt: skip
    _store(y, n0, features, None, residual_ptr, out_ptr)


@triton.jit
def _store(y, n0, features, bias_ptr, residual_ptr, out_ptr):
    """Add bias and residual to y [8] and store it."""
    n = n0 + tl.arange(0, _ROWS)
    valid = n < features
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=valid, other=0).to(tl.float32)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + n, mask=valid, other=0).to(tl.float32)
    tl.store(out_ptr + n, y, mask=valid)
