"""What a step begins with: rows of the embedding, and the angles of rotary position embedding.

PyTorch takes eight launches for these; at a few rows each is latency alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.launch import await_inputs, dependent_launch


def embedding(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return rows ids [T] (int32, in range) of the contiguous table [V, D]: [T, D]."""
    tokens, width = len(ids), table.shape[1]
    out = torch.empty(tokens, width, dtype=table.dtype, device=table.device)
    block = min(2048, triton.next_power_of_2(width))
    _embedding[(tokens, triton.cdiv(width, block))](
        table, ids, out, width, BLOCK=block, **dependent_launch(table)
    )
    return out


def rotary_angles(
    positions: torch.Tensor, inv_freq: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [T, R] float32 of positions [T] int32 by inv_freq [R], times `scale`.

    Angles are products in float32 (arXiv 2104.09864, section 3.2.2); `scale` is that of yarn.
    """
    tokens, width = len(positions), len(inv_freq)
    both = torch.empty(2, tokens, width, dtype=torch.float32, device=positions.device)
    _rotary_angles[(tokens,)](
        positions, inv_freq, both, scale,
        ROPE=width, BLOCK=triton.next_power_of_2(width),
        num_warps=1, **dependent_launch(positions),
    )  # fmt: skip
    return both[0], both[1]


@triton.jit
def _embedding(table_ptr, ids_ptr, out_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (t, i) owns the i-th BLOCK columns of token t."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    await_inputs(PDL)
    row = tl.load(ids_ptr + token).to(tl.int64)
    values = tl.load(table_ptr + row * width + d, mask=d < width)
    tl.store(out_ptr + token * width + d, values, mask=d < width)


@triton.jit
def _rotary_angles(
    positions_ptr, inv_freq_ptr, out_ptr, scale,
    ROPE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program t owns token t."""
    token, tokens = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    r = tl.arange(0, BLOCK)
    await_inputs(PDL)
    inv_freq = tl.load(inv_freq_ptr + r, mask=r < ROPE, other=0)
    angle = tl.load(positions_ptr + token).to(tl.float32) * inv_freq
    out = out_ptr + token * ROPE + r
    tl.store(out, tl.cos(angle) * scale, mask=r < ROPE)
    tl.store(out + tokens * ROPE, tl.sin(angle) * scale, mask=r < ROPE)
