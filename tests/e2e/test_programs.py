"""The programs that a user runs: clients, demo, perf-smoke."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepseek_triton.server import RunningServer
from tests.e2e.support import complete, processes_serving

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.parametrize(
    ("program", "flags"),
    [("grpc_stream.py", []), ("http_generate.py", []), ("http_generate.py", ["--stream"])],
    ids=["grpc", "http", "http streamed"],
)
def test_a_client_prints_the_completion(
    server: RunningServer, program: str, flags: list[str]
) -> None:
    url = server.grpc_url if program == "grpc_stream.py" else server.http_url
    sampling = ["--temperature", "1", "--seed", "5", "--top-k", "40", "--top-p", "0.9"]
    request = ["--prompt", "Hello", "--max-tokens", "12", "--stop", "never seen"]
    result = run(f"client/{program}", "--url", url, *request, *sampling, *flags)
    expected = complete(
        server, "Hello", max_tokens=12, temperature=1.0, seed=5, top_k=40, top_p=0.9
    )
    assert (result.returncode, result.stdout) == (0, expected.text + "\n")


@pytest.mark.parametrize("program", ["grpc_stream.py", "http_generate.py"])
def test_a_client_says_that_no_server_is_there(program: str) -> None:
    result = run(f"client/{program}", "--url", "127.0.0.1:1", "--prompt", "Hello")
    assert result.returncode == 1
    assert "no server at 127.0.0.1:1" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("program", ["grpc_stream.py", "http_generate.py"])
def test_a_client_shows_the_servers_message(server: RunningServer, program: str) -> None:
    url = server.grpc_url if program == "grpc_stream.py" else server.http_url
    result = run(f"client/{program}", "--url", url, "--prompt", "Hello", "--top-p", "7")
    assert result.returncode == 1
    assert "top_p" in result.stderr


def test_the_demo_does_the_whole_job_and_soon_the_second_time() -> None:
    first = run("build_scripts/demo.py", timeout=180.0)
    assert first.returncode == 0, first.stderr
    start = time.monotonic()
    second = run("build_scripts/demo.py", timeout=60.0)
    assert second.returncode == 0, second.stderr
    assert time.monotonic() - start < 20.0
    assert "kept from an earlier run" in second.stdout
    assert second.stdout.count("tokens/s]") == 2
    assert second.stdout.count("    if value < lower:\n") == 2  # the shipped model's own words
    assert processes_serving(ROOT / ".cache/demo/engine-demo") == []


def test_ctrl_c_in_the_demo_leaves_no_process() -> None:
    arguments = ["--arch", "v2-lite", "--max-tokens", "3000"]
    command = [sys.executable, "build_scripts/demo.py", *arguments]
    demo = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    assert any("gRPC stream" in line for line in demo.stdout)
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=30.0)
    assert demo.returncode == 130
    assert processes_serving(ROOT / ".cache/demo/engine-v2-lite") == []


def test_perf_analyzer_is_content_with_the_server(engine: Path) -> None:
    result = run("perf/perf_smoke.py", "--engine", str(engine), timeout=300.0)
    if "could not be downloaded" in result.stderr:
        pytest.skip(result.stderr)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ms") >= 8, result.stdout
