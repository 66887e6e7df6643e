"""Mixture of experts: the chosen experts' gated MLPs, and their weighted sum.

Three ways, by the number of tokens. One token reads its experts alone (experts_one_token.py,
int4_one_token.py). Up to FEW_TOKENS, a program owns a tile of one expert's weights and finds the
expert's tokens itself, so that each weight is read once. More tokens are sorted by expert into
blocks for the tensor cores; INT4 sorts sooner: larger sums would take the registers that unpacking
needs.
Sums over the chosen experts are taken in their order: no atomics, the same bits every time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from deepseek_triton.kernels.experts_one_token import one_token
from deepseek_triton.kernels.grouping import group_pairs
from deepseek_triton.kernels.int4_one_token import experts_int4_one
from deepseek_triton.kernels.int4_tensor import Int4Tensor
from deepseek_triton.kernels.launch import await_inputs, dependent_launch
from deepseek_triton.kernels.tiles import (
    dense_product,
    described_product,
    int4_product,
)

Matrices: TypeAlias = "torch.Tensor | Int4Tensor"  # one matrix for each expert
USE_DESCRIPTORS = True  # fetch weights of many tokens by the tensor memory unit: 14% faster
FEW_TOKENS = 64  # up to here tokens are matched by each program; beyond, sorted first
FEW_TOKENS_INT4 = 16


@dataclass(frozen=True)
class ExpertTile:
    """Sizes of one of the two products."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Matrices,
    down: Matrices,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return residual + Σ_p weights[:, p] · expert ids[:, p] of x: [T, D] in x's dtype.

    x [T, D], ids [T, P] int32 without repetition in a row, weights [T, P] float32,
    gate_up [E, 2·F, D] with rows gate 0, up 0, gate 1, up 1, …, down [E, D, F]; all contiguous,
    both floating-point or both INT4. `residual` and `out` may be one tensor, but not x.
    """
    tokens, width = x.shape
    hidden_size = down.shape[2]
    if out is None:
        out = torch.empty_like(x)
    if tokens == 1 and isinstance(gate_up, Int4Tensor) and isinstance(down, Int4Tensor):
        return experts_int4_one(x, ids, weights, gate_up, down, residual=residual, out=out)
    hidden = torch.empty(ids.numel(), hidden_size, dtype=x.dtype, device=x.device)
    if tokens == 1 and isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
        one_token(x, ids, weights, gate_up, down, hidden, residual, out)
        return out
    partial = torch.empty(ids.numel(), width, dtype=x.dtype, device=x.device)
    int4 = isinstance(gate_up, Int4Tensor)
    product: _Few | _Grouped = _Few()
    if tokens > (FEW_TOKENS_INT4 if int4 else FEW_TOKENS):
        product = _Grouped(ids, gate_up.shape[0], int4=int4)
    product(x, ids, weights, gate_up, hidden, down=False)
    product(hidden, ids, weights, down, partial, down=True)
    combine(partial, residual, out)
    return out


def experts_reference(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Matrices,
    down: Matrices,
    *,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `experts` in float32, one expert after the other, and round once."""
    gate_up = gate_up.dense() if isinstance(gate_up, Int4Tensor) else gate_up
    down = down.dense() if isinstance(down, Int4Tensor) else down
    y = torch.zeros_like(x, dtype=torch.float32)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        both = x[token].float() @ gate_up[expert].float().T
        hidden = torch.nn.functional.silu(both[:, 0::2]) * both[:, 1::2]
        y[token] += (hidden @ down[expert].float().T) * weights[token, choice, None]
    return (y if residual is None else y + residual.float()).to(x.dtype)


def append_shared_experts(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared_gate_up: torch.Tensor,
    shared_down: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (gate_up, down) with shared experts as further experts; copies all weights.

    shared_gate_up [2·S·F, D] holds all gate rows, then all up rows; shared_down [D, S·F].
    """
    hidden_size, width = down.shape[2], down.shape[1]
    gate, up = shared_gate_up.view(2, -1, hidden_size, width)
    both = torch.stack([gate, up], dim=2).flatten(1, 2)
    more_down = shared_down.view(width, -1, hidden_size).transpose(0, 1)
    return torch.cat([gate_up, both]), torch.cat([down, more_down])


def combine(partial: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write residual + the sum of each token's rows of partial [T·P, D] into out [T, D]."""
    tokens, width = out.shape
    block = min(1024, triton.next_power_of_2(width))
    _combine[(tokens, triton.cdiv(width, block))](
        partial, residual, out, width, PAIRS=partial.shape[0] // tokens, BLOCK=block,
        **dependent_launch(out),
    )  # fmt: skip


class _Few:
    """Products for few tokens: each program finds its expert's tokens."""

    def __call__(
        self,
        a: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        matrix: Matrices,
        out: torch.Tensor,
        *,
        down: bool,
    ) -> None:
        num_experts, features, width = matrix.shape
        tokens, pairs = ids.shape
        tile = few_tile(tokens, width, a.dtype, int4=_is_int4(matrix))
        _few_product[(triton.cdiv(features, tile.block_n), num_experts)](
            a, ids, weights, *_operands(matrix), out, tokens, features,
            K=width, PAIRS=pairs, BLOCK_T=tile.block_m, BLOCK_P=triton.next_power_of_2(pairs),
            DOWN=down, **_options(a, matrix, tile),
        )  # fmt: skip


class _Grouped:
    """Products of pairs sorted by expert; sorted once for both."""

    def __init__(self, ids: torch.Tensor, num_experts: int, *, int4: bool) -> None:
        rows = 128 if ids.numel() >= 64 * num_experts else 64
        if int4:  # about as many as an expert has on average
            rows = min(128, max(16, triton.next_power_of_2(ids.numel() // num_experts)))
        self._groups = group_pairs(ids, num_experts, rows)

    def __call__(
        self,
        a: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        matrix: Matrices,
        out: torch.Tensor,
        *,
        down: bool,
    ) -> None:
        num_experts, features, width = matrix.shape
        groups = self._groups
        tile = grouped_tile(groups.block_rows, features, width, a.dtype, int4=_is_int4(matrix))
        tiles = triton.cdiv(features, tile.block_n)
        described = None
        if USE_DESCRIPTORS and _describable(matrix):
            rows = _operands(matrix)[0].view(num_experts * features, width)
            described = TensorDescriptor.from_tensor(rows, [tile.block_n, tile.block_k])
        _grouped_product[(tiles * groups.block_experts.numel(),)](
            a, groups.pairs, groups.block_experts, weights, *_operands(matrix), described, out,
            features, tiles,
            K=width, PAIRS=ids.shape[1], BLOCK_M=tile.block_m, DOWN=down,
            **_options(a, matrix, tile),
        )  # fmt: skip


def few_tile(tokens: int, width: int, dtype: torch.dtype, *, int4: bool) -> ExpertTile:
    """Choose tiles for few tokens: many bytes in flight on each multiprocessor."""
    block_t = max(16, triton.next_power_of_2(tokens))
    whole = max(16, triton.next_power_of_2(width))
    if dtype == torch.float32:
        return ExpertTile(block_t, 32, min(whole, 64), 4, 2)
    if int4:
        if tokens <= 4:
            return ExpertTile(8, 64, 128, 4, 5)
        return ExpertTile(8 if tokens <= 8 else 16, 128, 128, 4, 4)
    return ExpertTile(block_t, 64, min(whole, 128), 4, 3)


def grouped_tile(
    rows: int, features: int, width: int, dtype: torch.dtype, *, int4: bool
) -> ExpertTile:
    """Choose tiles for blocks of `rows` sorted pairs."""
    whole = max(16, triton.next_power_of_2(width))
    if dtype == torch.float32:
        return ExpertTile(rows, 32, min(whole, 32), 8, 2)
    if int4 and rows <= 64:
        return ExpertTile(rows, 128, 128, 4, 4 if rows <= 32 else 3)
    if int4:
        return ExpertTile(rows, 256, 128, 8, 3)
    return ExpertTile(rows, 256 if features >= 256 else 64, min(whole, 64), 8, 4)


def _describable(matrix: Matrices) -> bool:
    """Whether the tensor memory unit can fetch tiles of it: rows of 16-byte multiples."""
    return not isinstance(matrix, Int4Tensor) and matrix.shape[-1] * matrix.itemsize % 16 == 0


def _is_int4(matrix: Matrices) -> bool:
    return isinstance(matrix, Int4Tensor)


def _operands(matrix: Matrices) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return (weights, scales, zero points) as the kernels take them."""
    if isinstance(matrix, Int4Tensor):
        return matrix.codes, matrix.scales, matrix.zeros
    return matrix, None, None


def _options(a: torch.Tensor, matrix: Matrices, tile: ExpertTile) -> dict[str, Any]:
    """Return the launch arguments that both kernels share."""
    return {
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "STAGES": tile.stages,
        "GROUP": matrix.group_size if isinstance(matrix, Int4Tensor) else 0,
        "ASM": a.is_cuda and a.dtype != torch.float32,
        "IEEE": a.dtype == torch.float32,
        "num_warps": tile.warps,
        **dependent_launch(a),
    }


@triton.jit
def _store_tile(
    acc, pair, valid_m, first, weights_ptr, out_ptr, features,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOWN: tl.constexpr, APART: tl.constexpr = False,
):  # fmt: skip
    """Finish acc [BLOCK_M, BLOCK_N] of rows `pair`: scale them, or join gate and up.

    A gate's up is the next column; with APART it is 8 further on, in each 16.
    """
    if DOWN:
        acc *= tl.load(weights_ptr + pair, mask=valid_m, other=0)[:, None]
        n = first + tl.arange(0, BLOCK_N)
        size = features
    else:
        if APART:
            both = tl.reshape(acc, [BLOCK_M, BLOCK_N // 16, 2, 8])
            acc = tl.reshape(tl.permute(both, 0, 1, 3, 2), [BLOCK_M, BLOCK_N])
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N // 2, 2]))
        acc = gate * tl.sigmoid(gate) * up
        n = first // 2 + tl.arange(0, BLOCK_N // 2)
        size = features // 2
    at = out_ptr + pair.to(tl.int64)[:, None] * size + n[None, :]
    tl.store(at, acc, mask=valid_m[:, None] & (n < size)[None, :])


@triton.jit
def _tile_product(
    a_ptr, pair, expert, first, weights_ptr, matrix_ptr, scales_ptr, zeros_ptr, out_ptr, features,
    K: tl.constexpr, PAIRS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DOWN: tl.constexpr, GROUP: tl.constexpr,
    ASM: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Rows `pair` [BLOCK_M] (−1 = none) times a tile of one expert's matrix; GROUP 0: dense."""
    valid_m = pair >= 0
    source = pair if DOWN else pair // PAIRS
    a_rows = a_ptr + source.to(tl.int64) * K
    n = tl.arange(0, BLOCK_N)
    if GROUP > 0 and not DOWN:  # tensor cores give a thread columns 8 apart: a gate and its up
        n = n // 16 * 16 + n % 8 * 2 + n // 8 % 2
    n += first
    valid_n = n < features
    if GROUP == 0:
        row = expert.to(tl.int64) * features + n
        acc = dense_product(
            a_rows, valid_m, matrix_ptr + row * K, valid_n,
            K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, IEEE,
        )  # fmt: skip
    else:
        n = tl.minimum(n, features - 1)  # rows beyond are not stored
        matrix = expert.to(tl.int64) * features
        word_rows = matrix_ptr + (matrix * ((K + 127) // 128) + n) * 32
        table = matrix * ((K + GROUP - 1) // GROUP) + n
        scales = scales_ptr + table
        zeros = zeros_ptr + table if zeros_ptr is not None else None
        acc = int4_product(
            a_rows, valid_m, word_rows, scales, zeros, features,
            K, BLOCK_M, BLOCK_N, STAGES, GROUP, ASM, IEEE, ROUND=BLOCK_M > 16,
        ).T  # fmt: skip
    _store_tile(
        acc, pair, valid_m, first, weights_ptr, out_ptr, features, BLOCK_M, BLOCK_N, DOWN, GROUP > 0
    )


@triton.jit
def _few_product(
    a_ptr, ids_ptr, weights_ptr, matrix_ptr, scales_ptr, zeros_ptr, out_ptr, tokens, features,
    K: tl.constexpr, PAIRS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DOWN: tl.constexpr,
    GROUP: tl.constexpr, ASM: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of one expert, for those of up to BLOCK_T tokens that chose it."""
    expert = tl.num_programs(1) - 1 - tl.program_id(1)  # shared experts, the longest, go first
    first = tl.program_id(0) * BLOCK_N
    t = tl.arange(0, BLOCK_T)
    await_inputs(PDL)
    p = tl.arange(0, BLOCK_P)[None, :]
    mask = (t < tokens)[:, None] & (p < PAIRS)
    ids = tl.load(ids_ptr + t[:, None] * PAIRS + p, mask=mask, other=-1)
    pair = tl.max(tl.where(ids == expert, t[:, None] * PAIRS + p, -1), axis=1)
    chosen = (pair >= 0).to(tl.int32)
    count = tl.sum(chosen, axis=0)
    if (count > 16) | ((BLOCK_T <= 16) & (count > 0)):
        _tile_product(
            a_ptr, pair, expert, first, weights_ptr, matrix_ptr, scales_ptr, zeros_ptr, out_ptr,
            features, K, PAIRS, BLOCK_T, BLOCK_N,
            BLOCK_K if BLOCK_T <= 16 else BLOCK_K // 2,
            STAGES, DOWN, GROUP, ASM, IEEE,
        )  # fmt: skip
    elif count > 0:
        rank = tl.cumsum(chosen, axis=0) - 1
        here = (rank[None, :] == tl.arange(0, 16)[:, None]) & (pair >= 0)[None, :]
        few = tl.max(tl.where(here, pair[None, :], -1), axis=1)
        _tile_product(
            a_ptr, few, expert, first, weights_ptr, matrix_ptr, scales_ptr, zeros_ptr, out_ptr,
            features, K, PAIRS, 16, BLOCK_N, BLOCK_K, STAGES, DOWN, GROUP, ASM, IEEE,
        )  # fmt: skip


@triton.jit
def _grouped_product(
    a_ptr, pairs_ptr, block_experts_ptr, weights_ptr, matrix_ptr, scales_ptr, zeros_ptr,
    descriptor, out_ptr, features, tiles,
    K: tl.constexpr, PAIRS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DOWN: tl.constexpr, GROUP: tl.constexpr,
    ASM: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of sorted pairs times one tile of its expert."""
    block = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * BLOCK_N
    await_inputs(PDL)
    expert = tl.load(block_experts_ptr + block)
    if expert >= 0:
        pair = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
        if descriptor is not None:
            source = tl.maximum(pair if DOWN else pair // PAIRS, 0)
            acc = described_product(
                a_ptr + source.to(tl.int64) * K, pair >= 0, descriptor, expert * features + first,
                K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
            _store_tile(
                acc, pair, pair >= 0, first, weights_ptr, out_ptr, features, BLOCK_M, BLOCK_N, DOWN
            )
        else:
            _tile_product(
                a_ptr, pair, expert, first, weights_ptr, matrix_ptr, scales_ptr, zeros_ptr,
                out_ptr, features, K, PAIRS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DOWN, GROUP, ASM,
                IEEE,
            )  # fmt: skip


@triton.jit
def _combine(
    partial_ptr, residual_ptr, out_ptr, width,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = n < width
    await_inputs(PDL)
    acc = tl.zeros([BLOCK], tl.float32)
    for p in tl.static_range(PAIRS):
        at = partial_ptr + (token * PAIRS + p) * width + n
        acc += tl.load(at, mask=valid, other=0).to(tl.float32)
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + token * width + n, mask=valid, other=0).to(tl.float32)
    tl.store(out_ptr + token * width + n, acc, mask=valid)
