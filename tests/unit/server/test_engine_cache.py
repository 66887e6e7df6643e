from __future__ import annotations

import os
from pathlib import Path

import pytest

from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.errors import CheckpointError, TokenizerError
from deepseek_triton.server.engine_cache import cached_engine_path, ensure_engine


def test_an_engine_is_built_once_and_again_after_the_checkpoint_changed(tmp_path: Path) -> None:
    checkpoint = write_random_checkpoint(tmp_path / "checkpoint", preset_config("v2-lite"))
    engine = tmp_path / "cache" / "engine"
    assert ensure_engine(checkpoint, engine)
    assert not ensure_engine(checkpoint, engine)
    os.utime(next(checkpoint.glob("*.safetensors")), (1, 1))
    assert ensure_engine(checkpoint, engine)


def test_a_tokenizer_that_cannot_serve_is_refused_before_the_build(tmp_path: Path) -> None:
    checkpoint = write_random_checkpoint(tmp_path / "checkpoint", preset_config("v2-lite"))
    (checkpoint / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        ensure_engine(checkpoint, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_a_checkpoint_folder_that_does_not_exist_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: the folder does not exist"):
        ensure_engine(tmp_path / "nowhere", tmp_path / "engine")


def test_each_checkpoint_folder_has_its_own_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, other = (cached_engine_path(tmp_path / parent / "model") for parent in "ab")
    assert one != other
    assert one.parent == tmp_path / "deepseek-triton" / "engines"
    assert one == cached_engine_path(tmp_path / "a" / ".." / "a" / "model")


def test_the_documentation_names_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    place = cached_engine_path(Path("/models/v3")).parent.relative_to(Path.home())
    page = Path(__file__).parents[3] / "docs" / "serving.md"
    assert f"`~/{place}/`" in page.read_text(encoding="utf-8")
