"""From the hidden state to the experts of each token: norm, router and choice.

For few tokens one launch: the program that finishes a block of tokens last makes their choice.
Which one that is does not change the result: it reads what all of them have written.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.launch import await_inputs, dependent_launch
from deepseek_triton.kernels.rms_norm import rms_norm, rms_norm_reference
from deepseek_triton.kernels.routing import (
    Routing,
    choice_sizes,
    choose,
    expert_of,
    is_expert,
    route,
    route_reference,
)

_FEW_TOKENS = 64  # beyond, the product takes the tensor cores
_WIDE_TILES = 4096 * 64  # logits


@dataclass(frozen=True)
class _Tile:
    block_t: int
    block_e: int
    block_d: int
    warps: int


def choose_experts(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    routing: Routing,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the RMS norm of x [T, D] in x's dtype, and what `route` returns for its logits.

    Logits are the product of the rounded norm with weight [E, D], of any float dtype, in float32.
    Launches on one device must follow one another: they share a counter.
    """
    tokens, width = x.shape
    experts = weight.shape[0]
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    if tokens > _FEW_TOKENS:
        normed = rms_norm(x, norm_weight, eps)
        tile = _many_tile(tokens, experts, width)
        _router_product[(triton.cdiv(tokens, tile.block_t), triton.cdiv(experts, tile.block_e))](
            normed, weight, logits, tokens, experts,
            K=width, BLOCK_M=tile.block_t, BLOCK_N=tile.block_e, BLOCK_K=tile.block_d, STAGES=3,
            EXACT=x.dtype != torch.float32, num_warps=tile.warps, **dependent_launch(x),
        )  # fmt: skip
        return normed, *route(logits, routing, bias)
    tile = _tile(tokens, width)
    columns = routing.top_k + routing.num_shared
    normed = torch.empty_like(x)
    ids = torch.empty(tokens, columns, dtype=torch.int32, device=x.device)
    weights = torch.empty(tokens, columns, dtype=torch.float32, device=x.device)
    _choose_few[(triton.cdiv(experts, tile.block_e), triton.cdiv(tokens, tile.block_t))](
        x, weight, norm_weight, bias, normed, logits, _arrivals(x.device), ids, weights,
        tokens, eps, routing.scaling_factor,
        D=width, BLOCK_T=tile.block_t, BLOCK_E=tile.block_e, BLOCK_D=tile.block_d,
        num_warps=tile.warps, **choice_sizes(routing), **dependent_launch(x),
    )  # fmt: skip
    return normed, ids, weights


def choose_experts_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    routing: Routing,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `choose_experts` with products in float64."""
    normed = rms_norm_reference(x, norm_weight, eps)
    logits = (normed.double() @ weight.double().T).float()
    return normed, *route_reference(logits, routing, bias)


def _tile(tokens: int, width: int) -> _Tile:
    """Choose tiles; a whole row at a time where registers hold it."""
    if tokens == 1:  # a warp for each 2,048 columns
        block_d = _block(width, 8192)
        return _Tile(1, 1, block_d, max(1, block_d // 2048))
    if tokens <= 16:
        return _Tile(1, 2, _block(width, 2048), 1) if width <= 2048 else _Tile(2, 2, 2048, 4)
    return _Tile(4, 4, _block(width, 1024), 4)


def _many_tile(tokens: int, experts: int, width: int) -> _Tile:
    """Choose tiles of the tensor cores: wide ones where there are enough to fill the card."""
    if tokens * experts >= _WIDE_TILES:
        return _Tile(32, _block(experts, 64), _block(width, 64), 4)
    return _Tile(32, 16, _block(width, 128), 4)


def _block(width: int, limit: int) -> int:
    return min(limit, max(16, int(triton.next_power_of_2(width))))


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Return counters of finished programs, one for each block of tokens; every launch leaves 0."""
    return torch.zeros(_FEW_TOKENS, dtype=torch.int32, device=device)


@triton.jit
def _normed(x, scale, norm):
    """Return rows x [T, N] times their scale, rounded, times the norm's weights, rounded."""
    return ((x.to(tl.float32) * scale[:, None]).to(x.dtype) * norm[None, :]).to(x.dtype)


@triton.jit
def _products(normed, w):
    """Return [T, E, N] float32 products of each row of normed [T, N] and of w [E, N]."""
    return normed.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :]


@triton.jit
def _router_tile(
    x_rows, normed_rows, valid_t, w_rows, valid_e, norm_ptr, eps, store,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Return the logits [T, E] of rows of x and of the router, and store the norm if told to."""
    d = tl.arange(0, BLOCK_D)
    if BLOCK_D >= D:  # weights are on their way before the wait
        inside = d < D
        w = tl.load(w_rows[:, None] + d, mask=valid_e[:, None] & inside, other=0)
        norm = tl.load(norm_ptr + d, mask=inside, other=0)
        await_inputs(PDL)
        mask = valid_t[:, None] & inside
        x = tl.load(x_rows[:, None] + d, mask=mask, other=0)
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)
        normed = _normed(x, scale, norm)
        tl.store(normed_rows[:, None] + d, normed, mask=mask & store)
        return tl.sum(_products(normed, w), axis=2)
    else:
        await_inputs(PDL)
        squares = tl.zeros([x_rows.shape[0], BLOCK_D], tl.float32)
        for start in range(0, D, BLOCK_D):
            at = start + d
            x = tl.load(x_rows[:, None] + at, mask=valid_t[:, None] & (at < D), other=0)
            squares += x.to(tl.float32) * x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(squares, axis=1) / D + eps)
        acc = tl.zeros([x_rows.shape[0], w_rows.shape[0], BLOCK_D], tl.float32)
        for start in range(0, D, BLOCK_D):
            at = start + d
            mask = valid_t[:, None] & (at < D)
            x = tl.load(x_rows[:, None] + at, mask=mask, other=0)
            normed = _normed(x, scale, tl.load(norm_ptr + at, mask=at < D, other=0))
            tl.store(normed_rows[:, None] + at, normed, mask=mask & store)
            w = tl.load(w_rows[:, None] + at, mask=valid_e[:, None] & (at < D), other=0)
            acc += _products(normed, w)
        return tl.sum(acc, axis=2)


@triton.jit
def _choose_few(
    x_ptr, weight_ptr, norm_ptr, bias_ptr, normed_ptr, logits_ptr, arrived_ptr, ids_ptr,
    weights_ptr, tokens, eps, scaling_factor,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, TOP_GROUPS: tl.constexpr, SHARED: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j): logits of BLOCK_E experts for BLOCK_T tokens; i = 0 also stores the norm."""
    EXPERTS: tl.constexpr = GROUPS * SIZE
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = t.to(tl.int64) * D
    logits = _router_tile(
        x_ptr + row, normed_ptr + row, t < tokens, weight_ptr + e * D, e < EXPERTS, norm_ptr, eps,
        tl.program_id(0) == 0, D, BLOCK_D, PDL,
    )  # fmt: skip
    mask = (t < tokens)[:, None] & (e < EXPERTS)[None, :]
    tl.store(logits_ptr + t[:, None] * EXPERTS + e[None, :], logits, mask=mask)
    tl.debug_barrier()  # all threads have stored before one of them says so
    arrived = arrived_ptr + tl.program_id(1)
    if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrived, 0)
        position = tl.arange(0, BLOCK_G * BLOCK_S)
        there = (t < tokens)[:, None] & is_expert(position, GROUPS, SIZE, BLOCK_S)[None, :]
        at = t[:, None] * EXPERTS + expert_of(position, SIZE, BLOCK_S)[None, :]
        # Not from the L1 cache, where another launch's logits may be left.
        all_logits = tl.load(logits_ptr + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        choose(
            all_logits, t, tokens, bias_ptr, ids_ptr, weights_ptr, scaling_factor,
            GROUPS, SIZE, BLOCK_G, BLOCK_S, TOP_K, BLOCK_K, TOP_GROUPS, SHARED, SIGMOID, NORMALIZE,
        )  # fmt: skip


@triton.jit
def _router_product(
    a_ptr, weight_ptr, logits_ptr, tokens, experts,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Logits of a tile, as exact as sums in float32.

    TF32 has 11 bits of a number. EXACT: those are all that 16-bit activations have, and a weight is
    the sum of its first 11 bits and the next. Else three products make up for what one leaves out.
    Each block of K has a sum of its own: the tensor cores cut off what they add to a large one.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid_m = (m < tokens)[:, None]
    valid_n = (n < experts)[:, None]
    await_inputs(PDL)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        a = tl.load(a_ptr + m.to(tl.int64)[:, None] * K + k, mask=valid_m & (k < K), other=0)
        w = tl.load(weight_ptr + n[:, None] * K + k, mask=valid_n & (k < K), other=0)
        a, w = a.to(tl.float32), w.to(tl.float32)
        if EXACT:
            high = (w.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            low = tl.dot(a, (w - high).T, input_precision="tf32")
            acc += tl.dot(a, high.T, low, input_precision="tf32")
        else:
            acc = tl.dot(a, w.T, acc, input_precision="tf32x3")
    at = logits_ptr + m[:, None] * experts + n[None, :]
    tl.store(at, acc, mask=valid_m & (n < experts)[None, :])
