from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepseek_triton.build import engine_dir
from deepseek_triton.build.engine_dir import create_engine_dir, load_engine_dir
from deepseek_triton.build.manifest import Manifest
from deepseek_triton.errors import BuildError, EngineMismatchError

WriteEngine = Callable[[Path], Manifest]


@pytest.fixture
def engine(write_engine: WriteEngine, tmp_path: Path) -> Path:
    with create_engine_dir(tmp_path / "engine") as folder:
        write_engine(folder)
    return tmp_path / "engine"


def test_an_engine_appears_whole_and_loads(engine: Path) -> None:
    loaded = load_engine_dir(engine, target="onnxruntime")
    assert loaded.model_path.read_bytes() == b"model"
    assert os.listdir(engine.parent) == ["engine"]
    assert engine.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("error", [KeyboardInterrupt, BuildError, OSError])
def test_a_build_that_fails_leaves_what_was_there(engine: Path, error: type[BaseException]) -> None:
    with pytest.raises((BuildError, KeyboardInterrupt)), create_engine_dir(engine) as folder:
        (folder / "model.onnx").write_bytes(b"half")
        raise error("stop")
    assert load_engine_dir(engine).model_path.read_bytes() == b"model"
    assert os.listdir(engine.parent) == ["engine"]


def test_what_a_killed_build_left_is_removed_and_a_running_build_is_not_disturbed(
    write_engine: WriteEngine, tmp_path: Path
) -> None:
    killed = tmp_path / "..engine.tmp-1a2b3c.tmp-4d5e"  # of the model that it was exporting
    killed.mkdir()
    (killed / "weights.bin").write_bytes(b"half of them")
    with create_engine_dir(tmp_path / "engine") as running:
        write_engine(running)
        assert not killed.exists()
        with create_engine_dir(tmp_path / "engine") as other:
            write_engine(other)
        assert running.is_dir()
    assert os.listdir(tmp_path) == ["engine"]


def test_a_new_engine_replaces_the_old_one_only_at_the_end(
    write_engine: WriteEngine, engine: Path
) -> None:
    with create_engine_dir(engine) as folder:
        write_engine(folder)
        (folder / "extra").touch()
        assert not (engine / "extra").exists()
    assert (engine / "extra").exists()
    assert os.listdir(engine.parent) == ["engine"]


def test_the_old_engine_returns_when_the_last_rename_fails(
    write_engine: WriteEngine, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def fail_once(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(BuildError, match="Input/output"), create_engine_dir(engine) as folder:
        write_engine(folder)
    assert load_engine_dir(engine).model_path.read_bytes() == b"model"
    assert os.listdir(engine.parent) == ["engine"]


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "home")
    for name in ("home", "file", "link"):
        with pytest.raises(BuildError, match="not an engine directory"):
            with create_engine_dir(tmp_path / name):
                pytest.fail("the block must not run")
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years of work"


def test_an_empty_folder_and_missing_parents_are_fine(
    write_engine: WriteEngine, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "a" / "b"):
        with create_engine_dir(path) as folder:
            write_engine(folder)
        assert load_engine_dir(path).path == path


def test_a_parent_that_cannot_hold_folders_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="cannot write engine directory .*file/engine"):
        with create_engine_dir(tmp_path / "file" / "engine"):
            pytest.fail("the block must not run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_parent_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(BuildError, match="Permission denied"):
            with create_engine_dir(tmp_path / "engine"):
                pytest.fail("the block must not run")
    finally:
        tmp_path.chmod(0o700)


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="disk is full"):
        with create_engine_dir(tmp_path / "engine"):
            raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(tmp_path) == []


def test_a_truncated_file_is_named(engine: Path) -> None:
    os.truncate(engine / "weights.bin", 100)
    for contents in (True, False):
        with pytest.raises(EngineMismatchError, match=r"weights.bin has 100 bytes.*make engine"):
            load_engine_dir(engine, verify_contents=contents)


def test_a_flipped_bit_is_found(engine: Path) -> None:
    data = bytearray((engine / "weights.bin").read_bytes())
    data[17] ^= 4
    (engine / "weights.bin").write_bytes(data)
    with pytest.raises(EngineMismatchError, match=r"weights.bin changed.*make engine"):
        load_engine_dir(engine)
    assert load_engine_dir(engine, verify_contents=False).path == engine


def test_a_missing_file_is_named(engine: Path) -> None:
    (engine / "weights.bin").unlink()
    with pytest.raises(EngineMismatchError, match="weights.bin is missing"):
        load_engine_dir(engine)


def test_another_target_is_named(engine: Path) -> None:
    with pytest.raises(EngineMismatchError, match="built for 'onnxruntime', 'tensorrt' is needed"):
        load_engine_dir(engine, target="tensorrt")


def test_what_is_there_instead_of_an_engine_directory_is_said(tmp_path: Path) -> None:
    nowhere, checkpoint, other = (tmp_path / name for name in ("nowhere", "checkpoint", "other"))
    for folder in (checkpoint, other):
        folder.mkdir()
    (checkpoint / "config.json").write_text("{}")
    for path, said in (
        (nowhere, f"no such folder; .* ENGINE={nowhere}$"),
        (checkpoint, f"is a checkpoint.* CHECKPOINT={checkpoint} ENGINE=<new folder>$"),
        (other, "no manifest.json there; .*make engine.* ENGINE=<new folder>$"),
    ):
        with pytest.raises(EngineMismatchError, match=said):
            load_engine_dir(path)


def test_names_that_leave_the_folder_are_refused(engine: Path) -> None:
    text = (engine / "manifest.json").read_text()
    (engine / "manifest.json").write_text(text.replace('"weights.bin"', '"../engine/weights.bin"'))
    with pytest.raises(EngineMismatchError, match="folder part"):
        load_engine_dir(engine)


def test_every_byte_counts_in_the_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_dir, "_READ_BYTES", 7)
    (tmp_path / "f").write_bytes(b"0123456789")
    (entry,) = engine_dir.describe_files(tmp_path)
    assert entry.size == 10
    assert entry.sha256 == "84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882"


def test_pieces_are_hashed_apart_and_their_order_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_dir, "PIECE_BYTES", 4)
    (tmp_path / "empty").touch()
    (tmp_path / "f").write_bytes(b"0123456789")
    empty, whole = engine_dir.describe_files(tmp_path)
    parts = [hashlib.sha256(part).digest() for part in (b"0123", b"4567", b"89")]
    assert whole.sha256 == hashlib.sha256(b"".join(parts)).hexdigest()
    assert empty.sha256 == hashlib.sha256(b"").hexdigest()
    (tmp_path / "f").write_bytes(b"4567012389")
    assert engine_dir.describe_files(tmp_path)[1].sha256 != whole.sha256


def test_files_are_flushed_as_they_are_described_and_a_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").touch()

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)  # a second flush of the same file may say nothing
    with pytest.raises(OSError, match="Input/output error"):
        engine_dir.describe_files(tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", "weights.bin"])
def test_a_file_that_may_not_be_read_is_not_said_to_need_a_rebuild(
    engine: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real_open = io.open  # what Path.open and Path.read_text call; root may read whatever it is

    def refuse(file: object, *args: Any, **kwargs: Any) -> Any:
        if file == engine / name:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return real_open(file, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(io, "open", refuse)
    with pytest.raises(EngineMismatchError, match=f"{name} cannot be read") as caught:
        load_engine_dir(engine)
    assert "rebuild" not in str(caught.value)


def test_a_filesystem_without_new_folders_is_named() -> None:
    with pytest.raises(BuildError, match="no folder can be made in /proc"):
        with create_engine_dir(Path("/proc/engine")):
            pytest.fail("the block must not run")
