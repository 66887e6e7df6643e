"""The second product of INT4 experts for a single token, summed over the experts at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.int4_tensor import Int4Tensor
from deepseek_triton.kernels.launch import await_inputs, dependent_launch
from deepseek_triton.kernels.linear_int4 import Int4Tile
from deepseek_triton.kernels.tiles import int4_block_product, load_int4_blocks


def one_token_down_int4(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    down: Int4Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write residual + Σ_p weights[p] · down[ids[p]] · hidden[p] into out [1, D].

    hidden [P, F], ids [1, P] int32, weights [1, P] float32, down [E, D, F]. The blocks of all
    experts follow each other as if they were one long row, so that loads never run dry.
    """
    _, features, width = down.shape
    wide = hidden.dtype == torch.float32
    tile = Int4Tile(8, 16, 4, 2, step=2) if wide else down_tile()
    _one_down_int4[(triton.cdiv(features, tile.block_n),)](
        hidden, ids, weights, down.codes, down.scales, down.zeros, residual, out, features,
        K=width, PAIRS=ids.numel(), BLOCK_N=tile.block_n, STEP=tile.step, STAGES=tile.stages,
        GROUP=down.group_size, ASM=hidden.is_cuda and not wide, IEEE=wide, num_warps=tile.warps,
        **dependent_launch(hidden),
    )  # fmt: skip


def down_tile() -> Int4Tile:
    """Choose sizes: programs are few, so each has many warps."""
    return Int4Tile(8, 16, 16, 2, step=16)


@triton.jit
def _one_down_int4(
    hidden_ptr, ids_ptr, weights_ptr, codes_ptr, scales_ptr, zeros_ptr, residual_ptr, out_ptr,
    features,
    K: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr, IEEE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid_n = n < features
    row = tl.arange(0, 8)  # the one row of hidden units, filled up to a tile
    blocks: tl.constexpr = (K + 127) // 128
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    word_rows = codes_ptr + n.to(tl.int64) * (blocks * 32)
    zeros = zeros_ptr + n if zeros_ptr is not None else None
    await_inputs(PDL)
    acc = tl.zeros([STEP, BLOCK_N, 8], tl.float32)
    for first in tl.range(0, PAIRS * blocks, STEP, num_stages=STAGES):
        index = first + tl.arange(0, STEP)
        pair = index // blocks
        block = index % blocks
        inside = pair < PAIRS
        matrix = tl.load(ids_ptr + pair, mask=inside, other=0).to(tl.int64) * features
        weight = tl.load(weights_ptr + pair, mask=inside, other=0)
        at = (matrix * blocks + block) * 32
        words = load_int4_blocks(word_rows, valid_n, at, inside)
        parts = int4_block_product(
            words, block, hidden_ptr + row * 0, tl.where(inside, pair * K, 0), row == 0,
            scales_ptr + n, zeros, matrix * groups, valid_n, features, K, GROUP, ASM, IEEE,
        )  # fmt: skip
        acc += parts * weight[:, None, None]
    y = tl.sum(tl.sum(acc, axis=0), axis=1)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + n, mask=valid_n, other=0).to(tl.float32)
    tl.store(out_ptr + n, y, mask=valid_n)
