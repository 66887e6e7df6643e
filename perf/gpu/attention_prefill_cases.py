"""Prefill attention at DeepSeek-V2-Lite, V3 and Llama shapes, and other tiles of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from attention_decode_cases import BLOCK_SIZE, NOPE, RANK, ROPE, SCALE, VALUE, WIDTH, make_cache
from check_data import DEVICE, Case, poisoned, randn, relative, tile_name

from deepseek_triton.kernels.latent_prefill import (
    latent_attention_prefill,
    latent_attention_prefill_reference,
)
from deepseek_triton.kernels.prefill_attention import (
    PrefillTile,
    prefill_attention,
    prefill_attention_reference,
)
from deepseek_triton.kernels.prefill_attention_hopper import HopperTile
from deepseek_triton.kernels.rms_norm import add_rms_norm, add_rms_norm_reference

_RAGGED = ([130] * 7, [0] * 7)
_CHUNKS = ([130] * 3, [125] * 3)
_ODD = ([1, 64, 129, 500, 257, 7], [200, 64, 1, 1000, 0, 121])
_PORTABLE, _HOPPER = PrefillTile(128, 64, 8, 3), HopperTile()


def prefill_cases(sweep: bool) -> Iterator[Case]:
    """Yield whole prompts, ragged batches, chunks after a context, grouped queries."""
    yield prefill_whole([1, 64, 129, 500], [0, 0, 0, 0])
    yield prefill_whole([1, 64, 129, 500], [200, 64, 1, 1000])
    for tokens in (1024, 8192):
        yield prefill_whole([tokens], [0])
        yield prefill_library(tokens, 16)
    for tile in (_PORTABLE, _HOPPER, *(_hopper_tiles() if sweep else ())):
        yield from kernel_cases(tile)
    tiles = ((128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (128, 32, 8, 3))
    for tokens in (1024, 8192) if sweep else ():
        for sizes in tiles:
            yield prefill_kernel([tokens], tile=PrefillTile(*sizes))
    yield norm_case()


def _hopper_tiles() -> Iterator[HopperTile]:
    """Yield the tiles of the Hopper kernel besides its own choice."""
    yield HopperTile(block_n=64, stages=4)


def kernel_cases(tile: PrefillTile | HopperTile) -> Iterator[Case]:
    """Yield the shapes that every tile is checked and timed with."""
    for lengths in (_RAGGED, _CHUNKS, _ODD):
        yield prefill_kernel(*lengths, tile=tile)
    yield prefill_kernel([2000], [3000], tile=tile)
    yield prefill_kernel([1024], tile=tile)
    yield prefill_kernel([1024] + [0] * 15, tile=tile)
    yield prefill_kernel([700, 3396] + [0] * 62, tile=tile)
    yield prefill_kernel([1024], heads=128, tile=tile)
    yield prefill_kernel([2048], heads=128, tile=tile)
    yield prefill_kernel([4096], heads=32, groups=8, rope=0, tile=tile)
    yield prefill_kernel([8192], tile=tile)


def prefill_flops(queries: int, heads: int, width: int = NOPE + ROPE + VALUE) -> float:
    """Operations of a causal prompt."""
    return queries * (queries + 1.0) * heads * width


def prefill_kernel(
    new: list[int],
    context: list[int] | None = None,
    *,
    heads: int = 16,
    groups: int | None = None,
    rope: int = ROPE,
    tile: PrefillTile | HopperTile,
) -> Case:
    """The flash kernel alone, on rows of `new` tokens after `context` others."""
    context = context or [0] * len(new)
    totals = [n + c for n, c in zip(new, context, strict=True)]
    kind = "hopper" if isinstance(tile, HopperTile) else "portable"
    sharing = f"/{groups}" if groups else ""
    name = f"{kind} {tile_name(tile)} new{sum(new)} ctx{sum(context)} rows{len(new)} h{heads}"

    def prepare() -> Callable[[int], torch.Tensor]:
        q = randn(sum(new), heads, NOPE + rope)
        k, v = (_ends_in_nan(sum(totals), groups or heads, 128) for _ in "kv")
        shared = _ends_in_nan(sum(totals), rope) if rope else None
        cu_q, cu_k = (
            torch.tensor([0, *lens], device=DEVICE).cumsum(0).int() for lens in (new, totals)
        )
        common = {"scale": SCALE, "k_rope": shared}

        def run(_: int, values: torch.Tensor = v) -> torch.Tensor:
            out = poisoned(*q.shape[:2], 128) if values is not v else None
            return prefill_attention(
                q, k, values, cu_q, cu_k, max_q=max(new), tile=tile, out=out, **common
            )

        def error() -> float:
            """The relative error; infinite if a row of infinite values shows in others."""
            found = relative(
                run(0, v.clone()), prefill_attention_reference(q, k, v, cu_q, cu_k, **common)
            )
            lost = v.clone()
            lost[cu_k[-2] :] = torch.inf
            others = slice(0, int(cu_q[-2]))
            same = torch.equal(run(0, lost)[others], run(0, v.clone())[others])
            return found if same else float("inf")

        run.error = error
        return run

    flops = sum(
        prefill_flops(t, heads, NOPE + rope + VALUE) - prefill_flops(c, heads, NOPE + rope + VALUE)
        for t, c in zip(totals, context, strict=True)
    )
    return Case(name + sharing, prepare, lambda run: run.error(), flops=flops, calls=4)


def _ends_in_nan(rows: int, *shape: int) -> torch.Tensor:
    """Random rows, behind which memory is NaN."""
    whole = poisoned(rows + 256, *shape)
    whole[:rows] = randn(rows, *shape)
    return whole[:rows]


def prefill_library(tokens: int, heads: int) -> Case:
    """PyTorch's own attention (cuDNN's kernel) on copied keys, for comparison."""

    def prepare() -> Callable[[int], torch.Tensor]:
        q, k = (randn(1, heads, tokens, NOPE + ROPE) for _ in "qk")
        v = randn(1, heads, tokens, VALUE)

        def run(_: int) -> torch.Tensor:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        return run

    flops = prefill_flops(tokens, heads)
    return Case(f"  cuDNN t{tokens} h{heads}", prepare, lambda run: 0.0, flops=flops, calls=4)


def prefill_whole(new: list[int], context: list[int], heads: int = 16) -> Case:
    """All of a layer between the first projection and the last."""
    totals = [n + c for n, c in zip(new, context, strict=True)]

    def prepare() -> Callable[[int], torch.Tensor]:
        cache = make_cache(totals, WIDTH, 1)
        offsets = [torch.arange(total, device=DEVICE) for total in totals]
        slots = [
            cache.tables[0, row].long()[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            for row, at in enumerate(offsets)
        ]
        new_slots = torch.cat([s[c:] for s, c in zip(slots, context, strict=True)]).int()
        key_slots = torch.cat(slots) if any(context) else None
        cu_q, cu_k = (
            torch.tensor([0, *lens], device=DEVICE).cumsum(0).int() for lens in (new, totals)
        )
        tokens = sum(new)
        q, kv_a = randn(tokens, heads * 192), randn(tokens, WIDTH)
        weights = randn(heads, NOPE, RANK, scale=0.1), randn(heads, RANK, VALUE, scale=0.05)
        angles = torch.rand(tokens, ROPE // 2, device=DEVICE).repeat_interleave(2, 1)
        rest = (
            kv_a, randn(RANK), 1e-6, *weights, angles.cos(), angles.sin(),
            cache.pool, new_slots, cu_q, cu_k, key_slots,
        )  # fmt: skip
        common = {"scale": SCALE, "interleaved": True}

        def run(_: int) -> torch.Tensor:
            return latent_attention_prefill(q, *rest, max_q=max(new), **common)

        run.fresh = lambda: latent_attention_prefill(q.clone(), *rest, max_q=max(new), **common)
        run.want = lambda: latent_attention_prefill_reference(q, *rest, **common)
        return run

    flops = sum(
        prefill_flops(t, heads) - prefill_flops(c, heads)
        for t, c in zip(totals, context, strict=True)
    )
    return Case(
        f"latent_attention_prefill new{sum(new)} ctx{sum(context)} rows{len(new)}",
        prepare, lambda run: relative(run.fresh(), run.want()),
        flops=flops + 4.0 * sum(totals) * heads * RANK * 128, calls=4,
    )  # fmt: skip


def norm_case() -> Case:
    """RMS norm of a sum, at one row."""

    def prepare() -> Callable[[int], Any]:
        x, residual, weight = randn(1, 2048), randn(1, 2048), randn(2048)

        def run(_: int) -> tuple[torch.Tensor, torch.Tensor]:
            return add_rms_norm(x, residual, weight, 1e-6)

        run.want = lambda: add_rms_norm_reference(x, residual, weight, 1e-6)
        return run

    return Case("add_rms_norm b1", prepare, lambda run: relative(run(0)[0], run.want()[0]), 12e3)
