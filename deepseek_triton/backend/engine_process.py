"""Decides where the model runs, and starts a process of its own for it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path

from deepseek_triton.backend.opening import EngineLimits, open_engine
from deepseek_triton.build.engine_dir import load_engine_dir
from deepseek_triton.config import EngineConfig
from deepseek_triton.engine.engine import Engine
from deepseek_triton.engine.link import Link
from deepseek_triton.engine.remote import RemoteEngine, RemoteGuides, how_it_ended
from deepseek_triton.errors import EngineDeadError

WORKER = "deepseek_triton.backend.engine_worker"

# The child takes the search path of this interpreter as it is, neither PYTHONPATH nor the current
# folder: inside a server the two differ, and it must import the very same package.
_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "importlib.import_module(sys.argv[2]).main(int(sys.argv[1]))"
)
# Its steps wait for a device, not for these cores.
_ON_DEVICE = ("cuda", "tensorrt", "tensorrt_rtx")


def start_engine(
    config: EngineConfig, on_death: Callable[[], object]
) -> tuple[Engine, EngineLimits]:
    """Load the engine directory where `config.engine_process` wants it, and start its engine.

    `on_death` is called once if the engine dies. Raises what `open_engine` raises.
    """
    own = config.engine_process == "own"
    if config.engine_process == "auto":
        engine_dir = load_engine_dir(Path(config.engine_dir), verify_contents=False)
        own = engine_dir.manifest.target in _ON_DEVICE
    if own:
        return start_process(config, on_death)
    return open_engine(config, on_death=on_death)


def start_process(
    config: EngineConfig, on_death: Callable[[], object], worker: str = WORKER
) -> tuple[RemoteEngine, EngineLimits]:
    """Start module `worker`, wait until it has loaded the model, and return its engine.

    Raises the error that it could not load with, EngineDeadError if it died of none.
    """
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [_python(), "-I", "-c", _BOOT, str(theirs.fileno()), worker, json.dumps(sys.path)],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
    link = Link(ours)
    try:
        link.send(config)
        loaded = link.receive()
    except (EOFError, OSError):
        link.close()
        raise EngineDeadError(
            f"the engine's process died while it loaded ({how_it_ended(process)}); its own words, "
            "if any, are above; signal 9 often means that memory ran out"
        ) from None
    if isinstance(loaded, Exception):
        link.close()
        how_it_ended(process)
        raise loaded
    admission, limits, has_guides = loaded
    engine = RemoteEngine(link, process, admission, on_death)
    if has_guides:
        limits = dataclasses.replace(limits, guides=RemoteGuides(engine))
    return engine, limits


def _python() -> str:
    """Return the interpreter of this process, which may be embedded in another program."""
    for candidate in (sys.executable, shutil.which("python3")):
        if candidate and Path(candidate).name.startswith("python"):
            return candidate
    raise EngineDeadError("no python3 on PATH to run the engine's process with")
