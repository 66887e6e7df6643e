"""Make variables with values that cannot be meant: one line that names the variable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKES_OWN = ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")

# In braces: folders of the test. The last part is what the message says beside the variable's name.
CASES: tuple[tuple[str, str, str, str], ...] = (
    ("engine", "DRAFT", "x", "mtp, or left out"),
    ("engine", "INT4_ACCURACY", "3", "0 or 4, or left out"),
    ("engine", "PRECISION", "fp64", "fp32, fp16, bf16"),
    ("engine", "PRECISION", "", "fp32, fp16, bf16"),
    ("engine", "TARGET", "x", "onnxruntime, cuda"),
    ("engine", "PROVIDER", "x", "cpu or cuda"),
    ("engine", "TP", "x", "at least 1"),
    ("engine", "PP", "0", "at least 1"),
    ("engine", "EP", "1.5", "at least 1"),
    ("engine", "EP", "2", "does not divide TP 1"),
    ("engine", "SM", "89", "onnxruntime engines have no fixed sizes"),
    ("engine", "MAX_BATCH", "x", "a whole number"),
    ("engine", "MAX_BATCH", "0", "1 ... 4096"),
    ("engine", "MAX_PREFILL", "5000", "1 ... 4096"),
    ("engine", "MAX_CHUNK", "-1", "a whole number"),
    ("engine", "MAX_CONTEXT", "1_0", "a whole number"),
    ("engine", "MAX_CONTEXT", "99999999", "0 ... 16777216"),
    ("quantize", "METHOD", "x", "awq, rtn"),
    ("quantize", "GROUP", "x", "32, 64 or 128"),
    ("quantize", "GROUP", "7", "32, 64 or 128"),
    ("quantize", "GROUP", "", "32, 64 or 128"),
    ("quantize", "SYMMETRIC", "x", "0 or 1"),
    ("quantize", "SYMMETRIC", "2", "0 or 1"),
    ("quantize", "CALIBRATION", "/nonexistent", "cannot be read"),
    ("quantize", "CALIBRATION", "{empty}", "holds no UTF-8 text"),
    ("quantize", "OUT", "{empty}", "exists already"),
    ("checkpoint", "ARCH", "x", "v2-lite, v2, v3"),
    ("checkpoint", "SEED", "x", "at least 0"),
    ("checkpoint", "SEED", "-1", "at least 0"),
    ("checkpoint", "OUT", "", "make checkpoint OUT=dir"),
    ("evaluate", "TEXT", "{empty}", "holds no UTF-8 text"),
    ("evaluate", "TEXT", "{short}", "one window takes 513"),
    ("evaluate", "TEXT", "/nonexistent", "cannot be read"),
    ("evaluate", "TEXT", "/nonexistent.xz", "cannot be read"),
    ("evaluate", "ENGINE", "/nonexistent", "no such folder"),
    ("evaluate", "REFERENCE", "/nonexistent", "no such folder"),
    ("demo", "ARCH", "x", "v2-lite, v2, v3"),
    ("serve", "HTTP_PORT", "x", "from 0 to 65535"),
    ("serve", "GRPC_PORT", "65536", "from 0 to 65535"),
    ("serve", "METRICS_PORT", "", "from 0 to 65535"),
    ("serve", "HOST", "192.0.2.1", "not an address of this machine"),
    ("serve", "HOST", "", "empty; give an address"),
    ("gateway", "GATEWAY_PORT", "x", "from 0 to 65535"),
    ("gateway", "GATEWAY_PORT", "65536", "from 0 to 65535"),
    ("gateway", "HOST", "192.0.2.1", "choose another"),
    ("gateway", "HOST", "", "empty; give an address"),
    ("gateway", "TRITON", "x", "not HOST:PORT"),
    ("gateway", "TRITON", "x:y", "not HOST:PORT"),
    ("gateway", "TRITON", "x:1,x:1", "given twice"),
    ("gateway", "TRITON", "http://localhost:8001", "not HOST:PORT"),
    ("gateway", "GRPC_PORT", "x", "not HOST:PORT"),
    ("gateway", "GRPC_PORT", "70000", "not HOST:PORT"),
    ("up", "GATEWAY_PORT", "8000", "are both 8000"),
    ("up", "GATEWAY_PORT", "x", "from 0 to 65535"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty").mkdir()
    (folder / "short").write_text("hello")
    return {"empty": folder / "empty", "short": folder / "short", "new": folder / "new"}


@pytest.mark.parametrize(("name", "value"), [("NUM_THREADS", "abc"), ("NUM_THRAEDS", "1")])
def test_a_bad_setting_is_refused_before_a_server_starts(
    engine: Path, name: str, value: str
) -> None:
    variable = f"DEEPSEEK_TRITON_{name}"
    done = subprocess.run(
        [sys.executable, "-m", "deepseek_triton.server", "--engine", str(engine)],
        cwd=ROOT, env={**os.environ, variable: value},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert variable in line


def test_what_a_shell_says_of_the_machine_is_not_taken_for_a_choice() -> None:
    shell = {"HOST": "worker-7", "ARCH": "x86_64", "CONFIG": "release"}
    show = "show: ; @echo $(HOST) [$(ARCH)$(CONFIG)]"
    make = ("make", "--no-print-directory", "--eval", show, "show")
    kept = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    for command, printed in ((make, "127.0.0.1 []"), ((*make, "ARCH=v3"), "127.0.0.1 [v3]")):
        done = subprocess.run(
            command, cwd=ROOT, env={**kept, **shell}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == printed


@pytest.mark.parametrize(("target", "variable", "value", "words"), CASES, ids=lambda v: v[:20])
def test_a_bad_value_is_refused_in_one_line(
    checkpoint: Path, engine: Path, folders: dict[str, Path],
    target: str, variable: str, value: str, words: str,
) -> None:  # fmt: skip
    new = str(folders["new"])
    variables = {
        "engine": {"CHECKPOINT": str(checkpoint), "ENGINE": new},
        "quantize": {"CHECKPOINT": str(checkpoint), "OUT": new},
        "checkpoint": {"OUT": new},
        "demo": {},
    }.get(target, {"ENGINE": str(engine)})
    variables = variables | {variable: value.format_map(folders)}
    # The recipes as they are, with the Python that runs the tests in place of an installation.
    command = ["make", "--silent", "--old-file=setup", f"BIN={Path(sys.executable).parent}", target]
    command += [f"{name}={text}" for name, text in variables.items()]
    # Not as a part of the make that runs the tests, which would number its lines and give it flags.
    environment = {name: text for name, text in os.environ.items() if name not in MAKES_OWN}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make: ")]
    # uvicorn says by itself why it cannot listen, and before it the gateway where it tries to.
    assert len(lines) == 1 or (target, variable, value) == ("gateway", "HOST", "192.0.2.1"), lines
    assert variable in lines[-1] and words in lines[-1]
    assert "Traceback" not in done.stderr
    assert not folders["new"].exists()
