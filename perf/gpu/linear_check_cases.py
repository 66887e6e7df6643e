"""What linear_check.py runs: DeepSeek-V2-Lite and V3 shapes, and other tiles of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import check_data
import torch
from check_data import Case, poisoned, randn, random_ids, random_int4, relative, tile_name
from expert_check_cases import expert_cases
from sampling_check_cases import sampling_cases

from deepseek_triton.kernels import linear as linear_module
from deepseek_triton.kernels import linear_int4 as int4_module
from deepseek_triton.kernels.grouping import group_pairs
from deepseek_triton.kernels.int4_one_token import linear_int4_one
from deepseek_triton.kernels.linear import linear, linear_reference
from deepseek_triton.kernels.linear_int4 import Int4Tile, linear_int4
from deepseek_triton.kernels.router import choose_experts
from deepseek_triton.kernels.routing import Routing, route, route_reference
from deepseek_triton.kernels.step_inputs import embedding, rotary_angles

V2_ROUTING = Routing("softmax", 64, 6, num_shared=2)
V3_ROUTING = Routing("sigmoid", 256, 8, 2.5, True, 8, 4, 1)


def all_cases(*, sweep: bool) -> Iterator[Case]:
    """Yield every case; with `sweep` also those of other tiles."""
    yield from linear_cases(sweep)
    yield from int4_cases(sweep)
    yield from routing_cases()
    yield from step_input_cases()
    yield from sampling_cases()
    yield from expert_cases(sweep)


# ------------------------------------------------------------------------------------------ linear


def linear_case(rows: int, features: int, width: int, form: str, tile: Any = None) -> Case:
    """A linear layer; `form` names what is fused into it."""
    gated = form == "swiglu"

    def prepare() -> Callable[[int], Any]:
        total = features * (2 if gated else 1)
        copies = max(2, min(24, int(400e6 / (total * width * 2))))
        weights = [randn(total, width, scale=width**-0.5) for _ in range(copies)]
        x, norm, residual = randn(rows, width), randn(width), randn(rows, features)
        out = poisoned(rows, features)
        options: dict[str, Any] = {"swiglu": gated}
        if form in ("norm", "swiglu"):
            options |= {"norm_weight": norm, "eps": 1e-6}
        if form == "residual":
            options |= {"residual": residual}

        def run(i: int) -> Any:
            if form == "cublas":
                return x, weights[i % copies], options, torch.mm(x, weights[i % copies].T, out=out)
            with ExitStack() as stack:
                if tile:
                    stack.enter_context(patch.object(linear_module, "_tile", lambda *_: tile))
                    stack.enter_context(patch.object(linear_module, "MANY_FEATURES", 0))
                y = linear(x, weights[i % copies], out=out, **options)
            return x, weights[i % copies], options, y

        return run

    def check(run: Callable[[int], Any]) -> float:
        x, weight, options, y = run(1)
        return relative(y, linear_reference(x, weight, **options))

    name = f"linear {form} M={rows} {width}->{features}" + (f" {tile_name(tile)}" if tile else "")
    moved = features * width * 2 * (2 if gated else 1)
    return Case(name, prepare, check, moved, 2 * rows * moved / 2)


def linear_cases(sweep: bool) -> Iterator[Case]:
    """Yield the linear layers of a decode step and of a prefill."""
    for rows in (1, 8, 64):
        yield linear_case(rows, 3648, 2048, "norm")
        yield linear_case(rows, 2048, 2048, "residual")
        yield linear_case(rows, 10944, 2048, "swiglu")
        yield linear_case(rows, 2048, 10944, "residual")
        yield linear_case(rows, 102400, 2048, "plain")
        yield linear_case(rows, 3648, 2048, "cublas")
        yield linear_case(rows, 2048, 2048, "cublas")
    yield linear_case(4096, 3648, 2048, "norm")
    yield linear_case(3, 1000, 1111, "norm")
    if not sweep:
        return
    tile = linear_module._Tile
    for block_n, block_k, warps in ((2, 2048, 4), (4, 2048, 8), (8, 2048, 8), (2, 2048, 2)):
        yield linear_case(1, 3648, 2048, "norm", tile(1, block_n, block_k, warps, 3))
    for block_n, block_k, warps, stages in (
        (16, 128, 4, 4),
        (16, 512, 4, 3),
        (32, 128, 4, 4),
        (32, 256, 4, 4),
        (16, 256, 2, 4),
        (64, 128, 4, 4),
    ):
        for rows in (8, 64):
            shape = tile(max(16, rows), block_n, block_k, warps, stages)
            yield linear_case(rows, 3648, 2048, "norm", shape)
    for block_n, block_k, warps, stages in ((64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 8, 4)):
        for rows in (8, 64):
            shape = tile(max(16, rows), block_n, block_k, warps, stages)
            yield linear_case(rows, 102400, 2048, "plain", shape)


# -------------------------------------------------------------------------------------------- int4


def int4_case(
    rows: int,
    features: int,
    width: int,
    group: int,
    symmetric: bool,
    tile: Any = None,
    *,
    norm: bool = False,
) -> Case:
    """A W4A16 linear layer; one row alone takes the kernel for one token."""
    one = rows == 1 and tile is None and not norm
    options: dict[str, Any] = {}

    def prepare() -> Callable[[int], Any]:
        copies = max(2, min(48, int(200e6 / (features * width / 2))))
        weights = [
            random_int4(features, width, group=group, symmetric=symmetric) for _ in range(copies)
        ]
        x, out = randn(rows, width), poisoned(rows, features)
        if norm:
            options.update(norm_weight=randn(width), eps=1e-6)

        def run(i: int) -> Any:
            weight = weights[i % copies]
            if one:
                return x, weight, linear_int4_one(x, weight, out=out)
            with patch.object(int4_module, "_tile", (lambda *_: tile) if tile else _INT4_TILE):
                return x, weight, linear_int4(x, weight, out=out, **options)

        return run

    def check(run: Callable[[int], Any]) -> float:
        x, weight, y = run(1)
        return relative(y, linear_reference(x, weight.dense(), **options))

    kind = "sym" if symmetric else "zero"
    kind += " norm" if norm else ""
    name = f"int4 g{group} {kind} M={rows} {width}->{features}" + (
        f" {tile_name(tile)}" if tile else ""
    )
    moved = features * width * (0.5 + 2 / group)
    return Case(name, prepare, check, moved, 2 * rows * features * width, calls=48)


_INT4_TILE = int4_module._tile


def int4_cases(sweep: bool) -> Iterator[Case]:
    """Yield W4A16 linear layers."""
    for rows in (1, 8, 64):
        yield int4_case(rows, 18432, 7168, 128, True)
        yield int4_case(rows, 3648, 2048, 128, True, norm=True)
        yield int4_case(rows, 2048, 2048, 128, False)
        yield int4_case(rows, 21888, 2048, 128, True)
        yield int4_case(rows, 2048, 10944, 32, True)
    yield int4_case(8, 2048, 2048, 64, False)
    yield int4_case(4096, 3648, 2048, 128, True)
    yield int4_case(300, 1000, 1112, 32, False)
    if not sweep:
        return
    for tile in (Int4Tile(8, 128, 4, 4), Int4Tile(8, 128, 4, 5), Int4Tile(8, 64, 4, 4)):
        yield int4_case(8, 18432, 7168, 128, True, tile)
    for tile in (Int4Tile(64, 128, 4, 3), Int4Tile(32, 128, 4, 4)):
        yield int4_case(64, 18432, 7168, 128, True, tile)
    for tile in (Int4Tile(64, 128, 4, 3), Int4Tile(128, 128, 4, 3), Int4Tile(128, 128, 8, 4)):
        yield int4_case(4096, 3648, 2048, 128, True, tile)


# ------------------------------------------------------------------------------------- step inputs


def step_input_cases() -> Iterator[Case]:
    """Yield what a step begins with."""
    for tokens in (1, 8, 64, 8192):
        ids = torch.randint(0, 102400, (tokens,), dtype=torch.int32)
        yield embedding_case(tokens, ids)
        yield angles_case(tokens)


def embedding_case(tokens: int, ids: torch.Tensor) -> Case:
    """Rows of V2-Lite's embedding."""

    def prepare() -> Callable[[int], Any]:
        table, rows = randn(102400, 2048), ids.to(check_data.DEVICE)
        return lambda i: (table, rows, embedding(table, rows))

    def check(run: Callable[[int], Any]) -> float:
        table, rows, got = run(0)
        return 0.0 if torch.equal(got, table[rows.long()]) else 1.0

    return Case(f"embedding T={tokens}", prepare, check, tokens * 2048 * 4)


def angles_case(tokens: int) -> Case:
    """Angles near and far."""

    def prepare() -> Callable[[int], Any]:
        positions = torch.randint(0, 163840, (tokens,), device=check_data.DEVICE).int()
        inv_freq = torch.rand(64, device=check_data.DEVICE)
        inv_freq[0] = 1.0
        return lambda i: (positions, inv_freq, rotary_angles(positions, inv_freq, 1.5))

    def check(run: Callable[[int], Any]) -> float:
        positions, inv_freq, (cos, sin) = run(0)
        angle = (positions.float()[:, None] * inv_freq).double()
        return max(relative(cos, angle.cos() * 1.5), relative(sin, angle.sin() * 1.5))

    return Case(f"rotary_angles T={tokens}", prepare, check, tolerance=1e-6)


# ----------------------------------------------------------------------------------------- routing


def routing_cases() -> Iterator[Case]:
    """Yield router, choice and sorting."""
    for name, routing, width in (("v2", V2_ROUTING, 2048), ("v3", V3_ROUTING, 7168)):
        for tokens in (1, 8, 64, 1024):
            yield route_case(f"route {name} T={tokens}", routing, tokens)
            yield router_case(f"router {name} T={tokens}", routing, width, tokens)
    yield router_case("router v2 T=8192", V2_ROUTING, 2048, 8192)
    for tokens in (8, 64, 65, 1024, 8192):
        yield group_case(tokens)


def route_case(name: str, routing: Routing, tokens: int) -> Case:
    """The choice of experts."""

    def prepare() -> Callable[[int], Any]:
        logits = torch.randn(tokens, routing.num_experts, device=check_data.DEVICE)
        bias = None
        if routing.kind == "sigmoid":
            bias = torch.randn(routing.num_experts, device=check_data.DEVICE) * 0.1
        return lambda i: (logits, bias, route(logits, routing, bias))

    def check(run: Callable[[int], Any]) -> float:
        logits, bias, (ids, weights) = run(0)
        want_ids, want_weights = route_reference(logits, routing, bias)
        return relative(weights, want_weights) if torch.equal(ids, want_ids) else 1.0

    return Case(name, prepare, check, tolerance=1e-5)


def router_case(name: str, routing: Routing, width: int, tokens: int) -> Case:
    """Norm, router product and choice."""
    experts = routing.num_experts

    def prepare() -> Callable[[int], Any]:
        x, norm = randn(tokens, width), randn(width)
        weight = randn(experts, width, scale=width**-0.5).float()
        bias = None
        if routing.kind == "sigmoid":
            bias = torch.randn(experts, device=check_data.DEVICE) * 0.1
        return lambda i: (
            *(x, norm, weight, bias),
            choose_experts(x, weight, norm, 1e-6, routing, bias),
        )

    def check(run: Callable[[int], Any]) -> float:
        x, norm, weight, bias, (normed, ids, weights) = run(0)
        logits = (normed.double() @ weight.double().T).float()
        want_ids, want_weights = route_reference(logits, routing, bias)
        right = torch.equal(ids, want_ids) and relative(weights, want_weights) < 1e-4
        want = torch.nn.functional.rms_norm(x.float(), (width,), norm.float(), 1e-6)
        return relative(normed, want) if right else 1.0

    return Case(name, prepare, check, experts * width * 4)


def group_case(tokens: int) -> Case:
    """Sorting by expert."""

    def prepare() -> Callable[[int], Any]:
        ids = random_ids(tokens, 66, 8)
        return lambda i: (ids, group_pairs(ids, 66, 64))

    def check(run: Callable[[int], Any]) -> float:
        ids, groups = run(0)
        order = torch.sort(ids.flatten(), stable=True).indices
        pairs = groups.pairs[groups.pairs >= 0]
        owner = groups.block_experts.repeat_interleave(64)[groups.pairs >= 0]
        same = torch.equal(pairs.long(), order) and torch.equal(owner, ids.flatten()[pairs.long()])
        return 0.0 if same else 1.0

    return Case(f"group_pairs T={tokens}", prepare, check)
