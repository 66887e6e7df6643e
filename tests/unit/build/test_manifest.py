from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deepseek_triton.build.engine_dir import load_engine_dir
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


def test_an_engine_of_an_earlier_version_says_how_to_rebuild_it(
    write_engine: WriteEngine, tmp_path: Path
) -> None:
    """Such an engine does not tell which tokens overflowed."""
    changes = {"format_version": 4, "target": "cuda", "precision": "bf16", "draft_file": "d.onnx"}
    data = json.loads(write_engine(tmp_path).to_json()) | changes
    (tmp_path / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(EngineMismatchError, match="format_version is 4.*reads 5; rebuild it: make"):
        load_engine_dir(tmp_path)
    with pytest.raises(EngineMismatchError, match=r"TARGET=cuda PRECISION=bf16 DRAFT=mtp$"):
        load_engine_dir(tmp_path)
    odd = {"target": "x; reboot", "precision": ["$(reboot)"], "provider": None, "draft_file": None}
    (tmp_path / "manifest.json").write_text(json.dumps(data | odd | {"int4_accuracy_level": 0}))
    with pytest.raises(EngineMismatchError) as refused:
        load_engine_dir(tmp_path)
    assert str(refused.value).endswith(f" ENGINE={tmp_path} INT4_ACCURACY=0")


def test_an_engine_of_a_later_version_is_not_to_be_rebuilt(
    write_engine: WriteEngine, tmp_path: Path
) -> None:
    data = json.loads(write_engine(tmp_path).to_json()) | {"format_version": 99}
    (tmp_path / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(EngineMismatchError, match="later version .*: update this one$"):
        load_engine_dir(tmp_path)


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
