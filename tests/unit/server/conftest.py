from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepseek_triton.server.locate import STUB, ServerInstallation
from deepseek_triton.server.options import ServerOptions

FAKE = Path(__file__).with_name("fake_tritonserver.py")


@pytest.fixture
def installation(tmp_path: Path) -> ServerInstallation:
    """A server that is the fake program."""
    executable = tmp_path / "tritonserver"
    executable.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n', encoding="utf-8")
    executable.chmod(0o755)
    backend = tmp_path / "python_backend"
    backend.mkdir()
    for name in ("libtriton_python.so", "triton_python_backend_utils.py", STUB):
        (backend / name).write_bytes(b"")
    return ServerInstallation("fake", executable, backend, backend / STUB)


@pytest.fixture
def make_options(tmp_path: Path) -> Callable[..., ServerOptions]:
    """Options for a repository of one model, on free ports, with `env` for the fake."""
    model = tmp_path / "repository" / "tensorrt_llm"
    model.mkdir(parents=True)
    (model / "config.pbtxt").write_text("", encoding="utf-8")

    def make(**env: str) -> ServerOptions:
        return ServerOptions(
            engine_dir=tmp_path,
            model_repository=tmp_path / "repository",
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            ready_timeout_s=20.0,
            exit_timeout_s=0,
            env=env,
        )

    return make
