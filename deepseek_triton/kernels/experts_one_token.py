"""Mixture of experts for a single token: plain multiply-adds, each weight read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.launch import await_and_release, await_inputs, dependent_launch


def one_token(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write what experts.experts returns for x [1, D] into `out`; `hidden` [P, F] is scratch."""
    width, hidden_size = down.shape[1:]
    pairs, pdl = ids.numel(), dependent_launch(x)
    block_k = min(1024, max(16, triton.next_power_of_2(width)))
    _one_gate_up[(triton.cdiv(hidden_size, 4), pairs)](
        x, ids, gate_up, hidden, hidden_size, K=width, BLOCK_N=4, BLOCK_K=block_k, **pdl
    )
    # Directly behind _one_gate_up: it reads ids before it waits.
    # 8 elements for each of 64 threads: then the loads of both operands have one layout
    block_k = min(512, max(16, triton.next_power_of_2(hidden_size)))
    _one_down[(triton.cdiv(width, 4),)](
        hidden, ids, weights, down, residual, out, width,
        K=hidden_size, PAIRS=pairs, BLOCK_N=4, BLOCK_K=block_k, num_warps=2, **pdl,
    )  # fmt: skip


@triton.jit
def _one_gate_up(
    x_ptr, ids_ptr, matrix_ptr, hidden_ptr, hidden_size,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token: BLOCK_N hidden units of one of its experts."""
    pair = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = (n < hidden_size)[:, None]
    await_and_release(PDL)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    gate_rows = matrix_ptr + (expert * hidden_size + n[:, None]) * (2 * K)
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_ptr + k, mask=k < K, other=0).to(tl.float32)
        gate += x * tl.load(gate_rows + k, mask=valid & (k < K), other=0).to(tl.float32)
        up += x * tl.load(gate_rows + K + k, mask=valid & (k < K), other=0).to(tl.float32)
    gate_sum = tl.sum(gate, axis=1)
    hidden = gate_sum * tl.sigmoid(gate_sum) * tl.sum(up, axis=1)
    tl.store(hidden_ptr + pair * hidden_size + n, hidden, mask=n < hidden_size)


@triton.jit
def _one_down(
    hidden_ptr, ids_ptr, weights_ptr, matrix_ptr, residual_ptr, out_ptr, features,
    K: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token: BLOCK_N results, summed over all of its experts.

    The first expert's weights set out before the hidden units are there.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = (n < features)[:, None]
    tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    rows = matrix_ptr + (tl.load(ids_ptr).to(tl.int64) * features + n[:, None]) * K
    first = ()
    for tile in tl.static_range(tiles):
        k = tile * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        loaded = tl.load(rows + k, mask=valid & (k < K), other=0)
        first = first + (loaded,)  # type: ignore[assignment]
    await_inputs(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for pair in tl.static_range(PAIRS):
        rows = matrix_ptr + (tl.load(ids_ptr + pair).to(tl.int64) * features + n[:, None]) * K
        weight = tl.load(weights_ptr + pair)
        for tile in tl.static_range(tiles):
            k = tile * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
            hidden = tl.load(hidden_ptr + pair * K + k, mask=k < K, other=0).to(tl.float32)
            mask = valid & (k < K)
            matrix = first[tile] if pair == 0 else tl.load(rows + k, mask=mask, other=0)
            acc += (weight * hidden) * matrix.to(tl.float32)
    y = tl.sum(acc, axis=1)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + n, mask=n < features, other=0).to(tl.float32)
    tl.store(out_ptr + n, y, mask=n < features)
