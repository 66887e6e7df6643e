"""Keep what a benchmark measured, with where, when and how, as perf/results/<name>.json."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS_DIR = Path(__file__).parent / "results"
PACKAGES = (
    "numpy",
    "onnx",
    "onnxruntime",
    "torch",
    "transformers",
    "tritonclient",
    "nvidia-pytriton",
)


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


def save_result(name: str, measured: dict[str, Any]) -> Path:
    """Write perf/results/<name>.json, replacing an older run; returns its path."""
    result = {
        "name": name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python " + shlex.join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
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
