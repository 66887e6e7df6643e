"""make up: server and gateway live and die together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from deepseek_triton.server.ports import resolve_ports
from tests.e2e.support import processes_serving, wait_until
from tests.e2e.test_gateway import HELLO, LONG, MODEL, answers

PORTS = ("--http-port", "--grpc-port", "--metrics-port", "--gateway-port")


@pytest.fixture
def up(
    engine: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[subprocess.Popen[bytes], openai.OpenAI]]:
    """A launcher of its own, on a copy of the engine, so that its processes are known.

    The fixture's parameter is --exit-timeout, 0 if there is none.
    """
    own = tmp_path / "engine"
    own.mkdir()
    for file in engine.iterdir():
        os.link(file, own / file.name)
    ports = resolve_ports("127.0.0.1", dict.fromkeys(PORTS, 0))
    command = [sys.executable, "-m", "deepseek_triton.server", "--gateway", "--engine", str(own)]
    command += [f"{name}={port}" for name, port in ports.items()]
    command += [f"--exit-timeout={getattr(request, 'param', 0)}"]
    env = {**os.environ, "DEEPSEEK_TRITON_KV_CACHE_NUM_BLOCKS": "1024"}
    url = f"http://127.0.0.1:{ports['--gateway-port']}"
    with (tmp_path / "up.log").open("w") as log:
        launcher = subprocess.Popen(command, stderr=log, stdout=log, env=env)
        try:
            wait_until(lambda: answers(f"{url}/ready"), 90.0, "the gateway is ready")
            yield launcher, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        finally:
            launcher.kill()
            launcher.wait()


def tritonserver_of(launcher: subprocess.Popen[bytes]) -> int:
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    names = {int(pid): Path(f"/proc/{pid}/comm").read_text().strip() for pid in children}
    (pid,) = [pid for pid, name in names.items() if name == "tritonserver"]
    return pid


def test_a_signal_ends_a_stream_in_words_and_both(
    up: tuple[subprocess.Popen[bytes], openai.OpenAI], tmp_path: Path
) -> None:
    launcher, client = up
    stream: Any = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **LONG)
    next(iter(stream))
    launcher.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="shutting down") as broken:
        for chunk in stream:
            assert chunk.choices[0].finish_reason is None
    assert broken.value.code == "shutting_down"
    assert launcher.wait(120.0) == 0
    assert "Traceback" not in (tmp_path / "up.log").read_text()
    wait_until(lambda: not processes_serving(tmp_path / "engine"), 10.0, "no process is left")


@pytest.mark.parametrize("up", [600], indirect=True)
def test_a_second_ctrl_c_ends_both_at_once(
    up: tuple[subprocess.Popen[bytes], openai.OpenAI], tmp_path: Path
) -> None:
    launcher, client = up
    stream: Any = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **LONG)
    next(iter(stream))
    log = tmp_path / "up.log"
    launcher.send_signal(signal.SIGINT)
    wait_until(lambda: "to finish" in log.read_text(), 60.0, "it stops")
    launcher.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert launcher.wait(120.0) == 0
    assert "Traceback" not in log.read_text()
    wait_until(lambda: not processes_serving(tmp_path / "engine"), 10.0, "no process is left")


def test_a_signal_ends_both(up: tuple[subprocess.Popen[bytes], openai.OpenAI]) -> None:
    launcher, client = up
    assert client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
    server = tritonserver_of(launcher)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30.0) == 0
    assert not Path(f"/proc/{server}").exists()
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


def test_a_server_that_dies_breaks_the_stream_in_words_and_ends_both(
    up: tuple[subprocess.Popen[bytes], openai.OpenAI], tmp_path: Path
) -> None:
    launcher, client = up
    stream: Any = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **LONG)
    next(iter(stream))
    os.kill(tritonserver_of(launcher), signal.SIGKILL)
    with pytest.raises(openai.APIError, match="went away"):
        for chunk in stream:
            assert chunk.choices[0].finish_reason is None
    assert launcher.wait(30.0) == 1
    wait_until(lambda: not processes_serving(tmp_path / "engine"), 10.0, "no process is left")
