from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepseek_triton.server import stub_watch
from deepseek_triton.server.stub_watch import find_stubs


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return f"{tmp_path}/model_repository/tensorrt_llm/1"


@pytest.fixture
def processes(folder: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A stub, and an engine's process, whose search path names the stub's folder."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    arguments = (f"{folder}/model.py", json.dumps([folder, "/usr/lib/python3"]))
    started = [subprocess.Popen([*command, a], stdin=subprocess.PIPE) for a in arguments]
    yield started
    for process in started:
        process.communicate()


def test_the_engines_process_is_no_stub(
    processes: list[subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stub_watch, "members", lambda _: [process.pid for process in processes])
    found = find_stubs(1, tmp_path / "model_repository", ["postprocessing", "tensorrt_llm"])
    assert found == {processes[0].pid: "tensorrt_llm"}
