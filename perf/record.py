"""Keep what a benchmark measured, with where, when and how, as perf/results/<name>.json."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS_DIR = Path(__file__).parent / "results"
ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "numpy",
    "onnx",
    "onnxruntime",
    "torch",
    "transformers",
    "tritonclient",
    "nvidia-pytriton",
)


_PLACE = re.compile(r"(^|=)<[^<>]+>$")


def cpu_model() -> str:
    """Processor name as Linux states it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def installed_versions() -> dict[str, str]:
    """Versions of the packages whose speed or numbers matter here."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def command_line(argv: Sequence[str]) -> str:
    """Return the command to repeat, with each path outside the repository as its <last part>.

    Where a folder lay on the machine says nothing to others.
    """
    script, *arguments = argv
    shown = [os.path.relpath(script, ROOT), *map(_neutral, arguments)]
    # shlex would quote the brackets, which nobody is to type.
    return " ".join(["python", *(x if _PLACE.search(x) else shlex.quote(x) for x in shown)])


def _neutral(argument: str) -> str:
    option, equals, value = argument.partition("=")
    if not equals:
        option, value = "", argument
    path = os.path.expanduser(value)
    if not os.path.isabs(path) and not path.startswith(".."):
        return argument
    inside = os.path.relpath(path, ROOT)
    name = f"<{os.path.basename(os.path.abspath(path)) or 'folder'}>"
    return f"{option}{equals}{name if inside.startswith('..') else inside}"


def save_result(name: str, measured: dict[str, Any]) -> Path:
    """Write perf/results/<name>.json, replacing an older run; returns its path."""
    result = {
        "name": name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
        "machine": {
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
        },
        "versions": installed_versions(),
        "measured": measured,
    }
    RESULTS_DIR.mkdir(exist_ok=True)
    path = RESULTS_DIR / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path
