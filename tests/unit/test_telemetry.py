"""ONNX Runtime tells its maker nothing of who runs it, unless its user says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def files_of(home: Path, module: str, **environment: str) -> list[str]:
    """Import `module` in a process with an empty home; return what is found there afterwards."""
    kept = {
        k: v for k, v in os.environ.items() if k not in ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    }
    subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        env={**kept, "HOME": str(home), **environment},
        check=True,
    )
    return [path.name for path in home.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "module",
    [
        "deepseek_triton.runner.ort_session",
        "deepseek_triton.checkpoint.convert",
        "deepseek_triton.calibrate.layer_model",
    ],
)
def test_nothing_is_kept_in_the_home_folder(tmp_path: Path, module: str) -> None:
    assert files_of(tmp_path, module) == []


def test_a_user_may_have_it_otherwise(tmp_path: Path) -> None:
    code = "deepseek_triton, os; assert os.environ['ORT_DISABLE_TELEMETRY'] == '0'"
    files_of(tmp_path, code, ORT_DISABLE_TELEMETRY="0")
