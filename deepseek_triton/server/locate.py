"""Which tritonserver to run: an NVIDIA container's own, else the nvidia-pytriton wheel's."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deepseek_triton.errors import ServerError

CONTAINER_ROOT = Path("/opt/tritonserver")
STUB = "triton_python_backend_stub"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class ServerInstallation:
    """A tritonserver and the Python backend that fits the running Python."""

    description: str
    executable: Path
    python_backend: Path  # folder of libtriton_python.so and triton_python_backend_utils.py
    stub: Path
    library_dirs: tuple[Path, ...] = ()

    def link_backends(self, folder: Path) -> Path:
        """Make a --backend-directory in `folder` out of links, and return it."""
        backend = folder / "backends" / "python"
        backend.mkdir(parents=True)
        for file in self.python_backend.iterdir():
            if file.is_file() and file.name != STUB:
                (backend / file.name).symlink_to(file)
        (backend / STUB).symlink_to(self.stub)
        return backend.parent

    def environment(self, base: dict[str, str]) -> dict[str, str]:
        """Return `base` with what the server and its stubs need.

        A stub embeds an isolated interpreter: it ignores PYTHONPATH, and finds site-packages of a
        virtual environment (editable installs too) by looking for python3 on PATH.
        """
        env = dict(base)
        env["PATH"] = _prepend([Path(sys.prefix) / "bin"], base.get("PATH", os.defpath))
        if self.library_dirs:
            env["LD_LIBRARY_PATH"] = _prepend(self.library_dirs, base.get("LD_LIBRARY_PATH", ""))
        return env


def find_server(container_root: Path = CONTAINER_ROOT) -> ServerInstallation:
    """Return the tritonserver of this machine.

    Raises:
        ServerError: there is none, or its Python backend does not fit the running Python.
    """
    if (container_root / "bin" / "tritonserver").exists():
        return _container_server(container_root)
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ServerError(
            f"no tritonserver found: neither {container_root}/bin/tritonserver nor the "
            "nvidia-pytriton package; run `make setup` (Linux x86-64), or use one of NVIDIA's "
            "tritonserver containers"
        )
    return _embedded_server(Path(spec.origin).parent)


def _container_server(root: Path) -> ServerInstallation:
    backend = root / "backends" / "python"
    stub = backend / STUB
    if not stub.exists():
        raise ServerError(f"{backend}: the container has no Python backend; use a -py3 image")
    wanted = _stub_python(stub)
    if wanted is not None and wanted != _PYTHON:
        raise ServerError(
            f"the container's Python backend runs Python {wanted}, this is Python {_PYTHON}: "
            f"run `make setup PYTHON=python{wanted}` in a fresh .venv"
        )
    return ServerInstallation(f"{root}", root / "bin" / "tritonserver", backend, stub)


def _embedded_server(package: Path) -> ServerInstallation:
    root = package / "tritonserver"
    stub = root / "python_backend_stubs" / _PYTHON / STUB
    if not stub.exists():
        known = ", ".join(sorted(p.name for p in stub.parents[1].glob("*"))) or "none"
        raise ServerError(
            f"the embedded tritonserver has no stub for Python {_PYTHON} (it has: {known}); "
            "use Python 3.10 to 3.12"
        )
    return ServerInstallation(
        "nvidia-pytriton",
        root / "bin" / "tritonserver",
        root / "backends" / "python",
        stub,
        (package.parent / "nvidia_pytriton.libs", find_libpython()),
    )


def find_libpython(candidates: Iterable[Path] | None = None) -> Path:
    """Return the folder of the running Python's shared library, which the stub links to.

    Raises:
        ServerError: this Python was built without one.
    """
    name = f"libpython{_PYTHON}.so.1.0"
    for folder in _library_folders() if candidates is None else candidates:
        if (folder / name).exists():
            return folder
    raise ServerError(
        f"this Python ({sys.base_prefix}) has no {name}, which Triton's Python backend needs: "
        f"on Debian and Ubuntu, apt-get install libpython{_PYTHON}; with pyenv, build with "
        "PYTHON_CONFIGURE_OPTS=--enable-shared"
    )


def _library_folders() -> list[Path]:
    libdir = sysconfig.get_config_var("LIBDIR") or "/usr/lib"
    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    folders = [libdir, f"{libdir}/{multiarch}", f"{sys.base_prefix}/lib", f"/usr/lib/{multiarch}"]
    folders += ["/usr/lib64", *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    return [Path(folder) for folder in folders if folder]


def _stub_python(stub: Path) -> str | None:
    """Return the Python version that the stub binary links to, such as "3.12"."""
    match = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    return match[1].decode() if match else None


def _prepend(folders: Iterable[Path], value: str) -> str:
    return ":".join([*(str(folder) for folder in folders), *([value] if value else [])])
