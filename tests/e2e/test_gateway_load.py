"""A short load by NVIDIA's aiperf, which knows OpenAI's API alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from deepseek_triton.server import RunningServer
from tests.e2e.test_gateway import MODEL, running_gateway

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "perf"))

REQUESTS, TOKENS = 16, 12


def test_aiperf_gets_every_token_that_it_asks_for(
    engine: Path, server: RunningServer, tmp_path: Path
) -> None:
    from tools import aiperf

    program = aiperf()
    with running_gateway(engine, server.grpc_url, tmp_path / "gateway.log") as url:
        command = [str(program), "profile", "--model", MODEL, "--url", url]
        command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(engine)]
        command += ["--concurrency", "4", "--request-count", str(REQUESTS), "--workers-max", "2"]
        command += ["--synthetic-input-tokens-mean", "24", "--output-tokens-mean", str(TOKENS)]
        command += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count"]
        command += ["--ui", "none", "--artifact-dir", str(tmp_path / "out")]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    report = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert report["output_sequence_length"]["min"] == TOKENS
    assert report["output_sequence_length"]["max"] == TOKENS
    assert report["time_to_first_token"]["avg"] > 0
    assert "error_request_count" not in report or report["error_request_count"]["avg"] == 0
