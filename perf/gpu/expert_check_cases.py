"""Mixtures of experts: cases of linear_check.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import check_data
import torch
from check_data import Case, poisoned, randn, random_ids, random_int4, relative, tile_name

from deepseek_triton.kernels import experts as experts_module
from deepseek_triton.kernels.experts import (
    FEW_TOKENS,
    FEW_TOKENS_INT4,
    ExpertTile,
    experts,
    experts_reference,
)
from deepseek_triton.kernels.int4_tensor import Int4Tensor

V2_LITE = (2048, 66, 8, 1408)  # width, experts with the shared ones, chosen, expert width
V3 = (7168, 257, 9, 2048)


def expert_case(
    tokens: int,
    shape: tuple[int, int, int, int],
    kind: str,
    tile: Any = None,
    *,
    group: int = 128,
    described: bool = False,
    uneven: bool = False,
    thorough: bool = False,
) -> Case:
    """A mixture of experts, shared ones included.

    `thorough` compares every token, twice, and wants the same bits.
    """
    width, total, chosen, size = shape
    shared = 2 if shape == V2_LITE else 1
    ids_sets = 6

    def prepare() -> Callable[[int], Any]:
        make = _dense if kind == "bf16" else partial(_stacked_int4, group, kind == "int4")
        copies = 2 if tokens <= 64 and shape == V2_LITE else 1
        weights = [(make(total, 2 * size, width), make(total, width, size)) for _ in range(copies)]
        x = randn(tokens, width)
        ids = [random_ids(tokens, total, chosen, shared, uneven=uneven) for _ in range(ids_sets)]
        scores = torch.rand(tokens, chosen, device=check_data.DEVICE)
        residual, out = randn(tokens, width), poisoned(tokens, width)

        def run(i: int) -> Any:
            pair, chosen_ids = weights[i % copies], ids[i % ids_sets]
            with _set(tokens, kind, tile, described=described):
                y = experts(x, chosen_ids, scores, *pair, residual=residual, out=out)
            return x, chosen_ids, scores, pair, residual, y

        return run

    def check(run: Callable[[int], Any]) -> float:
        x, ids, scores, pair, residual, y = run(1)
        few = tokens if thorough else min(tokens, 256)  # the reference is slow
        want = experts_reference(x[:few], ids[:few], scores[:few], *pair, residual=residual[:few])
        error = relative(y[:few], want) if bool(torch.isfinite(y).all()) else float("inf")
        return error if not thorough or _repeats(run, y) else float("inf")

    active = total - shared
    expected = active * (1 - (1 - (chosen - shared) / active) ** tokens) + shared
    bytes_per_weight = 2.0 if kind == "bf16" else 0.5 + 4 / group
    moved = expected * 3 * width * size * bytes_per_weight
    label = "v2" if shape == V2_LITE else "v3"
    name = f"experts {kind} {label} T={tokens}" + (f" {tile_name(tile)}" if tile else "")
    name += f" g{group}" if group != 128 else ""
    name += " described" if described else ""
    name += " uneven" if uneven else ""
    calls = 12 if tokens <= 64 else 2
    return Case(
        name, prepare, check, moved, tokens * chosen * 6 * width * size, calls=calls, tolerance=2e-2
    )


@contextmanager
def _set(tokens: int, kind: str, tile: Any, *, described: bool) -> Iterator[None]:
    """Choose the tile, and how weights are fetched, inside."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(experts_module, "USE_DESCRIPTORS", described))
        if tile:
            few = FEW_TOKENS if kind == "bf16" else FEW_TOKENS_INT4
            name = "few_tile" if tokens <= few else "grouped_tile"
            stack.enter_context(patch.object(experts_module, name, lambda *_, **__: tile))
        yield


def _repeats(run: Callable[[int], Any], y: torch.Tensor) -> bool:
    """Whether run(1) writes the same bits into y again."""
    before = y.clone()
    y.fill_(float("nan"))
    run(1)
    return torch.equal(before, y)


def _dense(*shape: int) -> torch.Tensor:
    return randn(*shape, scale=shape[-1] ** -0.5)


def _stacked_int4(group: int, symmetric: bool, *shape: int) -> Int4Tensor:
    parts = [random_int4(*shape[1:], group=group, symmetric=symmetric) for _ in range(shape[0])]
    zeros = None if symmetric else torch.stack([p.zeros for p in parts if p.zeros is not None])
    return Int4Tensor(
        torch.stack([p.codes for p in parts]),
        torch.stack([p.scales for p in parts]),
        zeros,
        group,
        parts[0].width,
        check_data.DTYPE,
    )


def expert_cases(sweep: bool) -> Iterator[Case]:
    """Yield mixtures of experts."""
    for kind in ("bf16", "int4"):
        for tokens in (1, 2, 8, 64, 1024, 8192):
            yield expert_case(tokens, V2_LITE, kind)
    yield expert_case(1024, V2_LITE, "bf16", described=True)
    yield expert_case(8192, V2_LITE, "bf16", described=True)
    yield expert_case(1, V2_LITE, "int4z")
    yield expert_case(1, V2_LITE, "int4", group=32)
    yield expert_case(8, V2_LITE, "int4z")
    yield expert_case(64, V2_LITE, "int4z")
    yield expert_case(16, V2_LITE, "int4z", group=64)
    yield expert_case(64, V2_LITE, "int4z", group=32)
    yield expert_case(256, V2_LITE, "int4")
    yield expert_case(1024, V2_LITE, "int4z", group=64)
    for tokens in (1, 8, 64):
        yield expert_case(tokens, V3, "int4")
    yield expert_case(8, V3, "bf16")
    if sweep:
        yield from expert_sweep()


def grouped_cases(*, sweep: bool) -> Iterator[Case]:
    """Yield mixtures of experts of many tokens, with even and with uneven loads."""
    for kind in ("bf16", "int4"):
        for tokens in (1024, 4096, 8192):
            for uneven in (False, True):
                yield expert_case(
                    tokens, V2_LITE, kind, described=True, uneven=uneven, thorough=True
                )


def expert_sweep() -> Iterator[Case]:
    """Yield mixtures of experts with other tiles."""
    for block_n, block_k, warps, stages in (
        (64, 128, 4, 3),
        (128, 128, 4, 3),
    ):
        yield expert_case(8, V2_LITE, "bf16", ExpertTile(16, block_n, block_k, warps, stages))
        yield expert_case(64, V2_LITE, "bf16", ExpertTile(64, block_n, block_k, warps, stages))
    for block_n, warps, stages in ((128, 4, 5), (128, 4, 6), (64, 4, 5), (256, 8, 4)):
        for tokens in (8, 64):
            shape = ExpertTile(8 if tokens == 8 else 16, block_n, 128, warps, stages)
            yield expert_case(tokens, V2_LITE, "int4", shape)
    for block_n, warps in ((128, 4), (128, 8)):
        for tokens in (1024, 8192):
            yield expert_case(tokens, V2_LITE, "int4", ExpertTile(128, block_n, 128, warps, 3))
    for block_n, block_k, warps, stages in (
        (128, 64, 8, 3),
        (256, 64, 8, 4),
    ):
        for tokens in (1024, 8192):
            rows = 128 if tokens * 8 >= 64 * 66 else 64
            shape = ExpertTile(rows, block_n, block_k, warps, stages)
            yield expert_case(tokens, V2_LITE, "bf16", shape)
