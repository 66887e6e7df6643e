"""Data and comparison of the kernel checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deepseek_triton.kernels.int4_tensor import Int4Tensor, pack_int4

DEVICE = "cuda"
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """prepare() makes the data and returns run(i); check(run) returns the relative error."""

    name: str
    prepare: Callable[[], Callable[[int], Any]]
    check: Callable[[Callable[[int], Any]], float]
    bytes: float = 0.0
    flops: float = 0.0
    calls: int = 24
    timed: bool = True
    tolerance: float = 1e-2


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return ‖got − want‖ / ‖want‖; infinite if anything is not finite."""
    got, want = got.double(), want.double()
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - want).norm() / want.norm())


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Return normal data in the type under test."""
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE) * scale


def poisoned(*shape: int) -> torch.Tensor:
    """Return a tensor of NaN, so that what is not written shows."""
    return torch.full(shape, float("nan"), device=DEVICE, dtype=DTYPE)


def random_int4(*shape: int, group: int = 128, symmetric: bool = True) -> Int4Tensor:
    """Random weights […, N, K] of about unit gain."""
    groups = -(-shape[-1] // group)
    packed = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=DEVICE)
    scales = (torch.rand(*shape[:-1], groups, device=DEVICE) + 0.5) * (shape[-1] ** -0.5 / 5)
    zeros = None
    if not symmetric:
        zeros = torch.randint(5, 12, (*shape[:-1], groups), dtype=torch.uint8, device=DEVICE)
    return pack_int4(packed, scales.to(DTYPE), zeros, group)


def random_ids(
    tokens: int, total: int, chosen: int, shared: int = 2, *, uneven: bool = False
) -> torch.Tensor:
    """Ids [T, chosen] int32: routed ones drawn without repetition, then all shared ones.

    With `uneven` an expert is chosen some 1.1 times as often as the one before it, and the first
    four never.
    """
    draws = torch.rand(tokens, total - shared, device=DEVICE)
    if uneven:
        likely = 1.1 ** torch.arange(total - shared, device=DEVICE)
        draws = -draws.clamp(1e-30).log() / likely
        draws[:, :4] = float("inf")
    routed = draws.argsort(1)[:, : chosen - shared]
    always = torch.arange(total - shared, total, device=DEVICE).expand(tokens, -1)
    return torch.cat([routed, always], 1).int()


def tile_name(tile: Any) -> str:
    """Return the sizes of a tile, for a case's name."""
    return "/".join(str(v) for v in vars(tile).values())
