"""The server as a process: it refuses what cannot work, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepseek_triton.errors import ServerError
from deepseek_triton.server import RunningServer, running_server
from deepseek_triton.server.process_group import is_running, members
from tests.e2e.conftest import options
from tests.e2e.support import complete, processes_serving, wait_until


@pytest.fixture
def own_engine(engine: Path, tmp_path: Path) -> Path:
    """A copy of the engine, so that processes that serve it are this test's own."""
    return Path(shutil.copytree(engine, tmp_path / "engine"))


def shm_files(prefix: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{prefix}*"))


def shm_prefix(engine_dir: Path) -> str:
    """The beginning of the names of the shared memory files of the server of `engine_dir`."""
    for pid in processes_serving(engine_dir):
        command = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
        if match := re.search(r"shm-region-prefix-name=([^\0]+)", command):
            return match[1]
    raise AssertionError(f"no server of {engine_dir}")


def test_a_port_in_use_is_refused_with_port_and_setting(engine: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wanted = dataclasses.replace(options(engine), grpc_port=port)
        with (
            pytest.raises(ServerError, match=f"port {port} .*--grpc-port"),
            running_server(wanted, log_path=tmp_path / "log"),
        ):
            pass


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_engine_file_is_refused_by_name(
    own_engine: Path, tmp_path: Path, damage: str
) -> None:
    victim = max(own_engine.iterdir(), key=lambda path: path.stat().st_size)
    if damage == "missing":
        victim.unlink()
    elif damage == "truncated":
        os.truncate(victim, victim.stat().st_size - 1)
    else:
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    with pytest.raises(ServerError) as caught:  # noqa: SIM117
        with running_server(options(own_engine), log_path=tmp_path / "log"):
            pass
    message = str(caught.value)
    assert victim.name in message
    assert "EngineMismatchError" in message and "make engine" in message
    assert processes_serving(own_engine) == []


def test_an_unknown_setting_is_refused_by_name(own_engine: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="DEEPSEEK_TRITON_NUM_THRAEDS.*NUM_THREADS"),
        running_server(options(own_engine, num_thraeds=2), log_path=tmp_path / "log"),
    ):
        pass


def test_a_killed_server_leaves_no_process_and_no_shared_memory(
    own_engine: Path, tmp_path: Path
) -> None:
    with (
        pytest.raises(ServerError, match="ended with status -9"),
        running_server(options(own_engine), log_path=tmp_path / "log") as server,
    ):
        assert len(shm_files(server.shm_prefix)) >= 3  # one for each stub
        assert len(members(server.pid)) >= 4  # tritonserver and a stub for each Python model
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
    assert processes_serving(own_engine) == []
    assert shm_files(server.shm_prefix) == []


@pytest.fixture
def launcher(own_engine: Path) -> Iterator[subprocess.Popen[str]]:
    """`make serve`'s process, ready."""
    ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    command = [sys.executable, "-m", "deepseek_triton.server", "--engine", str(own_engine), *ports]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = []
        while not lines or "ready: serving" not in lines[-1]:
            lines.append(process.stderr.readline())
            assert lines[-1], "it ended before it was ready:\n" + "".join(lines)
        yield process
    finally:
        process.kill()
        process.communicate()
        wait_until(lambda: processes_serving(own_engine) == [], 10.0, "no process is left")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_foreground_server_with_status_0(
    launcher: subprocess.Popen[str], own_engine: Path, number: signal.Signals
) -> None:
    assert len(processes_serving(own_engine)) >= 4
    launcher.send_signal(number)
    launcher.communicate(timeout=20.0)
    assert launcher.returncode == 0
    assert processes_serving(own_engine) == []


def test_a_killed_launcher_takes_the_server_with_it(
    launcher: subprocess.Popen[str], own_engine: Path
) -> None:
    prefix = shm_prefix(own_engine)
    assert len(shm_files(prefix)) >= 3
    launcher.kill()
    launcher.wait()
    wait_until(lambda: processes_serving(own_engine) == [], 15.0, "the server ended")
    wait_until(lambda: shm_files(prefix) == [], 5.0, "its shared memory is gone")


@pytest.mark.parametrize("model", ["preprocessing", "tensorrt_llm", "postprocessing"])
def test_a_model_process_that_dies_ends_the_server_rather_than_hanging_requests(
    own_engine: Path, tmp_path: Path, model: str
) -> None:
    from client.grpc_stream import GenerationError

    with running_server(options(own_engine), log_path=tmp_path / "log") as server:
        assert complete(server, "Hello", max_tokens=4).text
        os.kill(stub_of(server, model), signal.SIGKILL)
        with pytest.raises(ServerError, match=f"model {model}: its process died"):
            server.wait()
        with pytest.raises(GenerationError):
            complete(server, "Hello", max_tokens=4, timeout_s=10.0)
        pid = server.pid
    assert not is_running(pid)


def stub_of(server: RunningServer, model: str) -> int:
    for pid in members(server.pid):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if f"/{model}/".encode() in command:
            return pid
    raise AssertionError(f"no stub of {model}")
