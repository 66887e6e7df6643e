"""INT4 weights for tests, with what they mean computed apart from the kernels' layout."""

from __future__ import annotations

import torch

from deepseek_triton.kernels.int4_tensor import Int4Tensor, pack_int4


def int4_weights(
    *shape: int, group_size: int, dtype: torch.dtype, symmetric: bool
) -> tuple[Int4Tensor, torch.Tensor]:
    """Return random weights […, N, K] as packed and as float64 values."""
    *rest, width = shape
    groups = -(-width // group_size)
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    scales = (torch.rand(*rest, groups) + 0.5).mul(0.1).to(dtype)
    zeros = torch.randint(0, 16, (*rest, groups), dtype=torch.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    weight = pack_int4(packed, scales, None if symmetric else zeros, group_size)
    zero = torch.full_like(zeros, 8) if symmetric else zeros
    wide = [t.double().repeat_interleave(group_size, -1)[..., :width] for t in (zero, scales)]
    return weight, (codes.double() - wide[0]) * wide[1]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return ‖got − want‖ / ‖want‖; NaN in `got` gives NaN."""
    return float((got.double() - want.double()).norm() / want.double().norm())
