"""Check and time the attention kernels on one GPU, at real shapes.

    python perf/gpu/attention_check.py --out results.json [--sweep] [--only PART] [--no-time]

Every check draws fresh data, leaves unused rows of the cache NaN and compares with float64. Times
are those of a call inside a CUDA graph, over copies of the cache that are larger together than L2.
"""

from __future__ import annotations

from collections.abc import Iterator

from attention_decode_cases import decode_cases
from attention_prefill_cases import prefill_cases
from check_data import Case
from linear_check import run_cases


def all_cases(*, sweep: bool) -> Iterator[Case]:
    """Yield every case; with `sweep` also those of other tiles."""
    yield from decode_cases(sweep)
    yield from prefill_cases(sweep)


if __name__ == "__main__":
    run_cases(__doc__.splitlines()[0], all_cases)
