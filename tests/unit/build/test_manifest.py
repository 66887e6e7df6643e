from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deepseek_triton.build.manifest import Manifest
from deepseek_triton.errors import EngineMismatchError

WriteEngine = Callable[[Path], Manifest]


def test_a_manifest_survives_the_round_trip(write_engine: WriteEngine, tmp_path: Path) -> None:
    manifest = write_engine(tmp_path)
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_another_format_version_is_named_before_anything_else(
    write_engine: WriteEngine, tmp_path: Path
) -> None:
    data = json.loads(write_engine(tmp_path).to_json())
    data.update(format_version=99, surprise=1)
    with pytest.raises(EngineMismatchError, match="format_version is 99"):
        Manifest.from_json(json.dumps(data))


def test_unknown_and_missing_keys_are_named(write_engine: WriteEngine, tmp_path: Path) -> None:
    data = json.loads(write_engine(tmp_path).to_json())
    with pytest.raises(EngineMismatchError, match="model.surprise: unknown key"):
        Manifest.from_json(json.dumps({**data, "model": {**data["model"], "surprise": 1}}))
    del data["kv_cache"]["block_size"]
    with pytest.raises(EngineMismatchError, match="kv_cache.block_size: missing key"):
        Manifest.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(EngineMismatchError, match="manifest.json"):
        Manifest.from_json(text)
