from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deepseek_triton.errors import ServerError
from deepseek_triton.server.locate import STUB, find_libpython, find_server

THIS = f"{sys.version_info.major}.{sys.version_info.minor}"


def make_container(root: Path, python: str) -> Path:
    backend = root / "backends" / "python"
    backend.mkdir(parents=True)
    (root / "bin").mkdir()
    (root / "bin" / "tritonserver").write_bytes(b"")
    (backend / STUB).write_bytes(b"\x7fELF...libpython" + python.encode() + b".so.1.0\0")
    (backend / "libtriton_python.so").write_bytes(b"")
    return root


def test_the_containers_own_server_comes_first(tmp_path: Path) -> None:
    root = make_container(tmp_path / "tritonserver", THIS)
    found = find_server(root)
    assert found.executable == root / "bin" / "tritonserver"
    assert "LD_LIBRARY_PATH" not in found.environment({"PATH": "/bin"})


def test_a_container_of_another_python_is_refused_with_the_way_out(tmp_path: Path) -> None:
    root = make_container(tmp_path / "tritonserver", "3.8")
    with pytest.raises(ServerError, match="runs Python 3.8.*make setup PYTHON=python3.8"):
        find_server(root)


def test_the_embedded_server_is_found_and_fits_this_python(tmp_path: Path) -> None:
    pytest.importorskip("pytriton")
    found = find_server(tmp_path / "no-container")
    assert found.executable.exists()
    assert found.stub.parent.name == THIS
    env = found.environment({"PATH": "/bin", "LD_LIBRARY_PATH": "/mine"})
    assert env["PATH"] == f"{sys.prefix}/bin:/bin"
    assert env["LD_LIBRARY_PATH"].endswith(":/mine")


def test_without_a_server_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"no tritonserver found.*make setup"):
        find_server(tmp_path)


def test_a_python_without_shared_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=f"libpython{THIS}.*apt-get install"):
        find_libpython([tmp_path])


def test_backends_are_linked_with_the_fitting_stub(tmp_path: Path) -> None:
    found = find_server(make_container(tmp_path / "tritonserver", THIS))
    backends = found.link_backends(tmp_path / "run")
    assert (backends / "python" / STUB).resolve() == found.stub
    assert (backends / "python" / "libtriton_python.so").exists()
