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
TIMEOUT_S = 240
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


def profile(grpc_url: str, folder: Path) -> dict[str, Any]:
    """Run perf_analyzer on the ensemble and return the profile that it exports."""
    values = {
        "text_input": ["What is deep learning?"],
        "max_tokens": [TOKENS],
        "min_tokens": [TOKENS],
        "stream": [True],
    }
    input_data, exported = folder / "input.json", folder / "profile.json"
    input_data.write_text(json.dumps({"data": [values]}), encoding="utf-8")
    command = [
        *perf_analyzer(),
        *("-m", "ensemble", "-u", grpc_url, "-i", "grpc", "--streaming", "--async"),
        *("--input-data", str(input_data), "--profile-export-file", str(exported)),
        *("--concurrency-range", f"{CONCURRENCY[0]}:{CONCURRENCY[-1]}"),
        *("--request-count", str(REQUESTS)),
    ]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SmokeError(f"perf_analyzer did not end within {TIMEOUT_S} s") from error
    if run.returncode or not exported.exists():
        raise SmokeError(f"perf_analyzer failed:\n{run.stdout}{run.stderr}")
    result: dict[str, Any] = json.loads(exported.read_text(encoding="utf-8"))
    return result


def check(exported: dict[str, Any]) -> list[Row]:
    """Return one row for each concurrency.

    Raises:
        SmokeError: a concurrency or its requests are missing, or a request did not get its tokens.
    """
    experiments = {e["experiment"]["value"]: e["requests"] for e in exported["experiments"]}
    if sorted(experiments) != list(CONCURRENCY):
        raise SmokeError(f"profile of concurrency {sorted(experiments)}, not {list(CONCURRENCY)}")
    return [_row(level, experiments[level]) for level in CONCURRENCY]


def _row(concurrency: int, requests: list[dict[str, Any]]) -> Row:
    if len(requests) < REQUESTS:
        raise SmokeError(f"{len(requests)} requests at concurrency {concurrency}, not {REQUESTS}")
    for request in requests:
        count = len(request["response_timestamps"])
        if count != TOKENS or not request.get("success", True):
            raise SmokeError(f"a request got {count} responses, not {TOKENS}: {request}")
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
        return check(profile(server.grpc_url, Path(folder)))


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
