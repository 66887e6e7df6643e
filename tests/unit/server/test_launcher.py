from __future__ import annotations

import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepseek_triton.errors import ServerError
from deepseek_triton.server import RunningServer, ServerOptions, launcher, running_server
from deepseek_triton.server.locate import ServerInstallation
from deepseek_triton.server.process_group import is_running, members

Options = Callable[..., ServerOptions]


def assert_nothing_is_left(server: RunningServer) -> None:
    assert members(server.pid) == []
    assert list(Path("/dev/shm").glob(f"{server.shm_prefix}*")) == []


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.02)


def test_a_ready_server_is_yielded_and_leaves_nothing_behind(
    installation: ServerInstallation, make_options: Options, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    options = make_options(FAKE_LOG="hello from the server")
    with running_server(options, log_path=log, installation=installation) as server:
        assert len(members(server.pid)) == 2  # the server and its stub
        with socket.create_connection(tuple(server.http_url.split(":"))):  # type: ignore[arg-type]
            pass
    assert_nothing_is_left(server)
    assert "hello from the server" in log.read_text(encoding="utf-8")


def test_a_server_that_ignores_sigterm_is_killed(
    installation: ServerInstallation, make_options: Options, tmp_path: Path
) -> None:
    options = make_options(FAKE_HANG="1")
    with running_server(options, log_path=tmp_path / "log", installation=installation) as server:
        start = time.monotonic()
    assert time.monotonic() - start < 6.0
    assert_nothing_is_left(server)


def test_a_killed_server_is_reported_and_its_stub_ended(
    installation: ServerInstallation, make_options: Options, tmp_path: Path
) -> None:
    with (
        pytest.raises(ServerError, match="status -9"),
        running_server(
            make_options(), log_path=tmp_path / "log", installation=installation
        ) as server,
    ):
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
    assert_nothing_is_left(server)


def test_a_stub_that_dies_ends_the_server_and_names_the_model(
    installation: ServerInstallation,
    make_options: Options,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running_server(
        make_options(), log_path=tmp_path / "log", installation=installation
    ) as server:
        (stub,) = set(members(server.pid)) - {server.pid}
        os.kill(stub, signal.SIGKILL)
        with pytest.raises(ServerError, match=r"model tensorrt_llm: its process died \(signal 9\)"):
            server.wait()
        assert members(server.pid) == []
    assert "model tensorrt_llm" in caplog.text
    assert_nothing_is_left(server)


def test_a_stop_in_good_order_is_no_death_of_a_model(
    installation: ServerInstallation,
    make_options: Options,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running_server(make_options(), log_path=tmp_path / "log", installation=installation):
        pass
    assert "died" not in caplog.text


def test_a_model_that_does_not_load_gives_its_own_message(
    installation: ServerInstallation, make_options: Options, tmp_path: Path
) -> None:
    line = (
        "E1130 05:04:01.819697 5835 model_lifecycle.cc:642] \"failed to load 'tensorrt_llm' "
        'version 1: Internal: EngineMismatchError: weights.bin is truncated\\n\\nAt:\\n  model.py"'
    )
    options = make_options(FAKE_LOG=line, FAKE_EXIT="1")
    with pytest.raises(ServerError) as caught:  # noqa: SIM117
        with running_server(options, log_path=tmp_path / "log", installation=installation):
            pass
    message = str(caught.value)
    assert message.endswith("model tensorrt_llm: EngineMismatchError: weights.bin is truncated")


def test_a_server_that_is_never_ready_names_the_model_and_the_setting(
    installation: ServerInstallation, make_options: Options, tmp_path: Path
) -> None:
    options = dataclasses.replace(make_options(FAKE_NOT_READY="1"), ready_timeout_s=1.0)
    with (
        pytest.raises(ServerError, match="waiting for tensorrt_llm.*--ready-timeout"),
        running_server(options, log_path=tmp_path / "log", installation=installation),
    ):
        pass


def test_a_long_start_says_what_is_still_loading(
    installation: ServerInstallation,
    make_options: Options,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher, "_TELL_S", 0.3)
    caplog.set_level("INFO")
    options = dataclasses.replace(make_options(FAKE_NOT_READY="1"), ready_timeout_s=1.0)
    with (
        pytest.raises(ServerError),
        running_server(options, log_path=tmp_path / "log", installation=installation),
    ):
        pass
    told = [line for line in caplog.messages if line.startswith("the models are loading, ")]
    assert 1 <= len(told) <= 3


def test_a_port_in_use_is_refused_before_anything_starts(
    installation: ServerInstallation, make_options: Options, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = dataclasses.replace(make_options(), metrics_port=port)
        with (
            pytest.raises(ServerError, match=f"port {port} .*METRICS_PORT .--metrics-port"),
            running_server(options, log_path=tmp_path / "log", installation=installation),
        ):
            pass
    assert not (tmp_path / "log").exists()


def test_an_empty_model_repository_is_refused(tmp_path: Path) -> None:
    options = ServerOptions(tmp_path, model_repository=tmp_path / "nowhere")
    with pytest.raises(ServerError, match="nowhere.*--model-repository"), running_server(options):
        pass


def test_the_engine_directory_and_settings_reach_the_server(
    installation: ServerInstallation, make_options: Options, tmp_path: Path
) -> None:
    options = make_options(DEEPSEEK_TRITON_NUM_BLOCKS="7")
    with running_server(options, log_path=tmp_path / "log", installation=installation) as server:
        variables = Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
        arguments = Path(f"/proc/{server.pid}/cmdline").read_bytes().split(b"\0")
    assert f"DEEPSEEK_TRITON_ENGINE_DIR={tmp_path}".encode() in variables
    assert b"DEEPSEEK_TRITON_NUM_BLOCKS=7" in variables
    assert {b"--http-address=127.0.0.1", b"--grpc-address=127.0.0.1"} <= set(arguments)


def test_an_engine_directory_in_the_environment_that_is_not_used_is_told(
    installation: ServerInstallation,
    make_options: Options,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("deepseek_triton"), "propagate", True)
    for other, told in ((tmp_path / "other", True), (tmp_path / "x" / "..", False)):
        caplog.clear()
        monkeypatch.setenv("DEEPSEEK_TRITON_ENGINE_DIR", str(other))
        with (
            caplog.at_level(logging.INFO, "deepseek_triton"),
            running_server(make_options(), log_path=tmp_path / "log", installation=installation),
        ):
            pass
        message = f"DEEPSEEK_TRITON_ENGINE_DIR={other} is not used: {tmp_path} was given"
        assert (message in caplog.messages) == told


LAUNCH = """
import sys
from pathlib import Path
from deepseek_triton.server import ServerOptions, running_server
from deepseek_triton.server.locate import ServerInstallation
repository, executable, backend, log = map(Path, sys.argv[1:])
options = ServerOptions(Path("."), repository, http_port=0, grpc_port=0, metrics_port=0)
installation = ServerInstallation("fake", executable, backend, backend / "stub")
with running_server(options, log_path=log, installation=installation) as server:
    print(server.pid, server.shm_prefix, flush=True)
    server.wait()
"""


def test_a_killed_launcher_takes_the_server_and_its_files_with_it(
    installation: ServerInstallation, make_options: Options, tmp_path: Path
) -> None:
    options = make_options()
    arguments = [options.model_repository, installation.executable, installation.python_backend]
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *map(str, arguments), str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    pid, prefix = launcher.stdout.readline().split()
    assert len(members(int(pid))) == 2
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: members(int(pid)) == [])
    wait_until(lambda: list(Path("/dev/shm").glob(f"{prefix}*")) == [])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell that runs the tests in the background has them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_kills_at_once(
    installation: ServerInstallation, make_options: Options, tmp_path: Path
) -> None:
    options = dataclasses.replace(make_options(FAKE_HANG="1"), exit_timeout_s=60)
    with running_server(options, log_path=tmp_path / "log", installation=installation) as server:
        interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        start = time.monotonic()
    interrupt.join()
    assert time.monotonic() - start < 10.0
    assert not is_running(server.pid)
    assert_nothing_is_left(server)
