"""Folders in the making, and what is left of them when their process is stopped or killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.temporary import temporary_sibling

ROOT = Path(__file__).resolve().parents[3]


def test_what_killed_processes_left_is_removed_and_a_running_one_is_not_disturbed(
    tmp_path: Path,
) -> None:
    left = [tmp_path / name for name in (".model.tmp-1a2b", "..model.tmp-1a2b.tmp-3c4d")]
    others = [tmp_path / name for name in (".model2.tmp-1a2b", "model", ".model.old-1a2b")]
    for folder in (*left, *others):
        folder.mkdir()
        (folder / "weights.bin").write_bytes(b"half of them")
    with temporary_sibling(tmp_path / "model") as running:
        assert not any(folder.exists() for folder in left)
        with temporary_sibling(running) as inner:
            inner.rename(running / "part")
        with temporary_sibling(tmp_path / "model") as other:
            assert other != running
        assert (running / "part").is_dir()
    assert sorted(os.listdir(tmp_path)) == sorted(folder.name for folder in others)


def test_a_block_that_raises_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), temporary_sibling(tmp_path / "new" / "model") as folder:
        (folder / "weights.bin").touch()
        raise KeyboardInterrupt
    assert os.listdir(tmp_path / "new") == []


@pytest.fixture
def writing(tmp_path: Path):  # type: ignore[no-untyped-def]
    """make_checkpoint.py while it writes, for seconds, to tmp_path / "out" / "model"."""
    config = preset_config("llama") | {"num_hidden_layers": 2, "vocab_size": 400_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    script = str(ROOT / "build_scripts" / "make_checkpoint.py")
    out = tmp_path / "out"
    command = [sys.executable, script, "--config", str(tmp_path / "config.json")]
    process = subprocess.Popen(
        [*command, "--out", str(out / "model")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not any(file.stat().st_size for file in out.glob(".model.tmp-*/*.safetensors")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield process, out
    process.kill()
    process.communicate()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"])
def test_a_checkpoint_that_is_stopped_leaves_nothing_and_says_so(writing, name: str) -> None:  # type: ignore[no-untyped-def]
    process, out = writing
    process.send_signal(getattr(signal, name))
    process.send_signal(signal.SIGTERM)  # a second one disturbs nothing
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.endswith("error: interrupted; nothing was changed\n")
    assert "Traceback" not in errors
    assert os.listdir(out) == []
