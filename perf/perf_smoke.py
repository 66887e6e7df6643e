"""A short perf_analyzer run against a real server, to see that the served contract suits the tool.

Starts a server on a small random checkpoint (or takes --engine), streams over gRPC at concurrency
1 to 4, checks that every request of the exported profile got exactly the tokens that it asked
for, and prints a small table. Numbers of so small a model say little about speed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import ToolError, perf_analyzer

from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.errors import DeepseekTritonError
from deepseek_triton.server import ServerOptions, running_server
from deepseek_triton.server.engine_cache import ensure_engine

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "perf-smoke"
TOKENS = 16
REQUESTS = 16  # at each concurrency
CONCURRENCY = range(1, 5)
TIMEOUT_S = 120
ATTEMPTS = 3
NS = 1e-9


class SmokeError(Exception):
    """perf_analyzer failed, or its profile is not what was asked for."""


@dataclass(frozen=True)
class Row:
    """What perf_analyzer saw at one concurrency; times in seconds."""

    concurrency: int
    requests: int
    first_token: float  # median
    between_tokens: float  # mean
    tokens_per_second: float


def profile(grpc_url: str, concurrency: int, folder: Path) -> list[dict[str, Any]]:
    """Run perf_analyzer on the ensemble and return the requests of the profile that it exports."""
    values = {
        "text_input": ["What is deep learning?"],
        "max_tokens": [TOKENS],
        "min_tokens": [TOKENS],
        "stream": [True],
        "return_num_output_tokens": [True],
    }
    input_data, exported = folder / "input.json", folder / f"profile-{concurrency}.json"
    input_data.write_text(json.dumps({"data": [values]}), encoding="utf-8")
    command = [
        *perf_analyzer(),
        *("-m", "ensemble", "-u", grpc_url, "-i", "grpc", "--streaming", "--async"),
        *("--input-data", str(input_data), "--profile-export-file", str(exported)),
        *("--concurrency-range", str(concurrency), "--request-count", str(REQUESTS)),
    ]
    for _ in range(ATTEMPTS):
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise SmokeError(f"perf_analyzer did not end within {TIMEOUT_S} s") from error
        if run.returncode or not exported.exists():
            raise SmokeError(f"perf_analyzer failed:\n{run.stdout[-1000:]}{run.stderr[:1000]}")
        # On a busy machine it now and then measures, reports, exits with 0 and exports no byte.
        if exported.stat().st_size:
            (experiment,) = json.loads(exported.read_text(encoding="utf-8"))["experiments"]
            requests: list[dict[str, Any]] = experiment["requests"]
            return requests
    raise SmokeError(f"perf_analyzer exported nothing, {ATTEMPTS} times")


def check(concurrency: int, requests: list[dict[str, Any]]) -> Row:
    """Return what the requests of one run amount to.

    Raises:
        SmokeError: a request is missing, or did not get its tokens.
    """
    if len(requests) < REQUESTS:
        raise SmokeError(f"{len(requests)} requests at concurrency {concurrency}, not {REQUESTS}")
    for request in requests:
        last = (request["response_outputs"] or [{}])[-1]
        if (last.get("num_output_tokens"), last.get("finish_reason")) != (TOKENS, "length"):
            raise SmokeError(
                f"a request did not get its {TOKENS} tokens; its last response: {last}"
            )
    firsts = sorted(r["response_timestamps"][0] - r["timestamp"] for r in requests)
    spans = [r["response_timestamps"][-1] - r["response_timestamps"][0] for r in requests]
    begin = min(r["timestamp"] for r in requests)
    end = max(r["response_timestamps"][-1] for r in requests)
    return Row(
        concurrency,
        len(requests),
        firsts[len(firsts) // 2] * NS,
        sum(spans) / len(spans) / (TOKENS - 1) * NS,
        len(requests) * TOKENS / ((end - begin) * NS),
    )


def table(rows: list[Row]) -> str:
    """Return the rows as text."""
    lines = ["concurrency  requests  first token  between tokens  tokens/s"]
    for r in rows:
        first, between = f"{1e3 * r.first_token:.1f} ms", f"{1e3 * r.between_tokens:.2f} ms"
        lines.append(
            f"{r.concurrency:11}  {r.requests:8}  {first:>11}  {between:>14}  "
            f"{r.tokens_per_second:8.0f}"
        )
    return "\n".join(lines)


def run(engine: Path) -> list[Row]:
    """Serve `engine` on free ports, measure, check."""
    options = ServerOptions(engine, http_port=0, grpc_port=0, metrics_port=0, exit_timeout_s=3)
    CACHE.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(options, log_path=CACHE / "server.log") as server,
    ):
        return [
            check(concurrency, profile(server.grpc_url, concurrency, Path(folder)))
            for concurrency in CONCURRENCY
        ]


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=Path, help="(default: one of a small random checkpoint)")
    engine = parser.parse_args().engine
    try:
        if engine is None:
            engine = CACHE / "engine"
            checkpoint = write_random_checkpoint(CACHE / "checkpoint", preset_config("v2-lite"))
            ensure_engine(checkpoint, engine)
        print(table(run(engine)))
    except (DeepseekTritonError, ToolError, SmokeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
