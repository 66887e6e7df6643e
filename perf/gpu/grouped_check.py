"""Check and time experts of many tokens on one GPU: every token, and the same bits twice.

python perf/gpu/grouped_check.py --out results.json [--sweep] [--only PART]
"""

from __future__ import annotations

from expert_check_cases import grouped_cases
from linear_check import run_cases

if __name__ == "__main__":
    run_cases(__doc__.splitlines()[0], grouped_cases)
