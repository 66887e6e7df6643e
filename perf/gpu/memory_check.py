"""Attention and expert kernels at small shapes, for NVIDIA's compute-sanitizer to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
        python perf/gpu/memory_check.py [--out results.json]

Without PyTorch's cache each tensor is an allocation of its own, so that reading beyond one shows.
Tiles over several blocks of the cache and the tile of float32 are among them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attention_decode_cases as decode
import check_data
import torch
from attention_prefill_cases import prefill_whole
from expert_check_cases import expert_case

from deepseek_triton.kernels.paged_decode import DecodeTile

SMALL_EXPERTS = (256, 10, 4, 96)  # width, experts, chosen, expert width
CONTEXTS = [1, 63, 0, 64, 65, 200]
TILES = (  # splits, keys, heads, warps, stages
    DecodeTile(4, 64, 16, 4, 2),
    DecodeTile(4, 64, 16, 8, 2),
    DecodeTile(4, 32, 16, 4, 2),
)


def bare(tile: DecodeTile | None, block_size: int) -> float:
    """Latent attention alone, over contexts of all lengths; the relative error."""
    cache = decode.make_cache(CONTEXTS, decode.WIDTH, 1, block_size)
    q = torch.randn(len(CONTEXTS), 16, decode.WIDTH, device="cuda").to(cache.pool.dtype)
    arguments = (q, cache.pool, cache.tables[0].clone(), cache.lens)
    got = decode.latent_decode(*arguments, scale=decode.SCALE, rank=decode.RANK, tile=tile)
    want = decode.latent_decode_reference(*arguments, scale=decode.SCALE, rank=decode.RANK)
    return check_data.relative(got, want)


def whole(heads: int, block_size: int, filters: str = "") -> float:
    """All launches of a layer's attention."""
    return decode.check_whole(decode.prepare_whole(CONTEXTS, heads, 1, block_size, True, filters))


def checked(case: check_data.Case) -> float:
    """A case of the other checks."""
    return case.check(case.prepare())


def wide() -> float:
    """The tile of float32, which has no pipeline."""
    before = check_data.DTYPE, decode.DTYPE
    check_data.DTYPE = decode.DTYPE = torch.float32
    try:
        return bare(None, 64)
    finally:
        check_data.DTYPE, decode.DTYPE = before


def all_cases() -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield names and what to run."""
    for tile in TILES:
        for block_size in (16, 64):
            yield (
                f"latent {check_data.tile_name(tile)} block {block_size}",
                partial(bare, tile, block_size),
            )
    yield "latent float32", wide
    for heads, block_size, name in ((16, 64, ""), (128, 64, ""), (16, 16, "all")):
        yield (
            f"latent layer h{heads} block {block_size} {name}",
            partial(whole, heads, block_size, name),
        )
    yield "grouped query", partial(checked, decode.grouped(3, 100))
    yield "prefill", partial(checked, prefill_whole([1, 64, 129], [200, 64, 1]))
    for kind in ("bf16", "int4", "int4z"):
        for tokens in (1, 5, 70):
            case = expert_case(tokens, SMALL_EXPERTS, kind)
            yield case.name, partial(checked, case)


def main() -> int:
    """Run every case; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="", help="JSON file for the errors")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name, run in all_cases():
        started = time.perf_counter()
        try:
            results[name] = run()
            torch.cuda.synchronize()
        except Exception:  # the others still run, if the device still does
            results[name] = traceback.format_exc()
        seconds = time.perf_counter() - started
        print(f"{name:50s} {results[name]} ({seconds:.1f} s)", flush=True)
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(any(not isinstance(error, float) or error > 0.02 for error in results.values()))


if __name__ == "__main__":
    sys.exit(main())
