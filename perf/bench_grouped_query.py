"""Decode speed of grouped-query attention against transformers' LlamaForCausalLM.

As perf/bench_engine.py, with a model of Llama's form: 388 million parameters, fp32, 16 heads of
which two each share a key (perf/reference_model.py).

    python perf/bench_grouped_query.py     # writes perf/results/grouped_query_decode.json
"""

from __future__ import annotations

import argparse
from functools import partial

from bench_engine import compare, reference_engine, run_worker
from record import save_result
from reference_model import GROUPED_QUERY_CONFIG


def main() -> None:
    """Run the rounds, print a table and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    checkpoint, engine_dir = reference_engine("grouped-query", GROUPED_QUERY_CONFIG)
    sides = {
        "engine": partial(run_worker, "engine", engine_dir),
        "transformers": partial(run_worker, "transformers", checkpoint),
    }
    print(save_result("grouped_query_decode", compare(sides, arguments.rounds)))


if __name__ == "__main__":
    main()
