"""The command lines: quantise, build, evaluate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint

SCRIPTS = Path(__file__).parents[3] / "build_scripts"


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_quantised_checkpoint_is_built_and_compared_with_its_original(tmp_path: Path) -> None:
    source = write_random_checkpoint(tmp_path / "source", preset_config("llama"))
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n\n" * 60)
    out = tmp_path / "int4"
    done = run(
        "quantize.py", "--checkpoint", source, "--out", out, "--group", 32,
        "--calibration", text, "--windows", 4, "--window-length", 64,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "linear layers in INT4" in done.stdout
    build_engine(source, tmp_path / "plain")
    build_engine(out, tmp_path / "engine")
    done = run(
        "evaluate.py", "--engine", tmp_path / "engine", "--reference", tmp_path / "plain",
        "--text", text, "--windows", 3, "--window-length", 100, "--json", tmp_path / "figures.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["tokens"] == 300
    assert 0 < figures["same_next_token"] <= 1
    assert abs(figures["loss_over_reference"]) < 0.5
    assert "loss_nats_per_token" in done.stdout


def test_errors_are_one_line_with_a_status(tmp_path: Path) -> None:
    done = run("quantize.py", "--checkpoint", tmp_path / "none", "--out", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert run("quantize.py", "--checkpoint", "", "--out", "").returncode == 2
    assert run("evaluate.py", "--engine", "").returncode == 2
    done = run("evaluate.py", "--engine", tmp_path / "none", "--text", tmp_path / "none.xz")
    assert (done.returncode, done.stderr[:7]) == (1, "error: ")


def test_a_text_that_would_not_be_used_is_refused(tmp_path: Path) -> None:
    source = write_random_checkpoint(tmp_path / "source", preset_config("llama"))
    base = ("quantize.py", "--checkpoint", source, "--out", tmp_path / "out", "--group", 32)
    done = run(*base, "--method", "rtn", "--calibration", "/nowhere")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: CALIBRATION: ") and "METHOD=awq" in done.stderr
    assert not (tmp_path / "out").exists()
    assert run(*base, "--method", "rtn").returncode == 0


def test_an_evaluation_says_what_is_no_engine(tmp_path: Path) -> None:
    """Not what its tokenizer lacks, which is what the text is read with first."""
    done = run("evaluate.py", "--engine", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"{tmp_path} is no engine directory" in done.stderr
