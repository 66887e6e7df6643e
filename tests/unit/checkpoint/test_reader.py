from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.errors import CheckpointError

A = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.array([1.5, -2.0], dtype=ml_dtypes.bfloat16)


def write_raw(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_shards(folder: Path, weight_map: dict[str, Any] | None = None) -> None:
    save_file({"a": A}, folder / "one.safetensors")
    save_file({"b": B}, folder / "two.safetensors")
    if weight_map is None:
        weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "dtype",
    [
        np.float64,
        np.float32,
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        np.int64,
        np.uint8,
        np.bool_,
    ],
)
def test_every_dtype_reads_back_as_it_was_saved(tmp_path: Path, dtype: Any) -> None:
    saved = np.array([[0, 1], [1, 0], [1, 1]]).astype(dtype)
    save_file({"x": saved}, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    assert reader.dtype("x") == saved.dtype
    assert reader.shape("x") == (3, 2)
    assert reader.read("x").tobytes() == saved.tobytes()


def test_reading_maps_the_file_instead_of_copying_it(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    first, second = reader.read("a"), reader.read("a")
    assert np.shares_memory(first, second)
    assert not first.flags.writeable
    assert not first.flags.owndata


def test_shards_read_as_one_checkpoint(tmp_path: Path) -> None:
    write_shards(tmp_path)
    reader = CheckpointReader(tmp_path)
    assert set(reader.names()) == {"a", "b"}
    np.testing.assert_array_equal(reader.read("a"), A)
    np.testing.assert_array_equal(reader.read("b"), B)
    assert reader.file("b").name == "two.safetensors"
    assert "b" in reader
    assert "c" not in reader


def test_scalars_and_empty_tensors_are_read(tmp_path: Path) -> None:
    save_file({"s": np.array(3.5, np.float32)}, tmp_path / "model.safetensors")
    assert CheckpointReader(tmp_path).read("s") == np.float32(3.5)
    save_file({"e": np.empty((0, 4), np.float32)}, tmp_path / "model.safetensors")
    assert CheckpointReader(tmp_path).read("e").shape == (0, 4)


def test_views_survive_the_reader(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    view = CheckpointReader(tmp_path).read("a")
    np.testing.assert_array_equal(view, A)


def resident_file_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_release_gives_the_pages_back_and_keeps_views_valid(tmp_path: Path) -> None:
    size = 64 << 20
    save_file({"x": np.ones(size // 4, np.float32)}, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    view = reader.read("x")
    before = resident_file_bytes()
    assert view.sum() == size // 4
    assert resident_file_bytes() - before > size // 2
    reader.release()
    assert resident_file_bytes() - before < size // 4
    assert view.sum() == size // 4


def test_require_names_tensor_file_and_both_shapes(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    np.testing.assert_array_equal(reader.require("a", (3, 4)), A)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor a .*\[3, 4\].*\[4, 3\]"):
        reader.require("a", (4, 3))
    with pytest.raises(CheckpointError, match="tensor nope is missing"):
        reader.require("nope", (1,))


@pytest.mark.parametrize("keep", [0, 7, 8, 40, -1])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": A}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "broken safetensors header"),
        (b"[]", "not an object"),
        (b"\xff\xff", "broken safetensors header"),
        (b'{"a": {}, "a": {}}', "a occurs twice"),
        ({"a": 3}, "tensor a: broken header entry"),
        ({"a": entry("F32", [-1], 0, 0)}, "tensor a: broken header entry"),
        ({"a": entry("F32", ["1"], 0, 4)}, "tensor a: broken header entry"),
        ({"a": entry("F4", [1], 0, 4)}, 'dtype "F4" is not supported'),
        ({"a": entry("F32", [2], 0, 4)}, "4 bytes do not hold F32"),
        (
            {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)},
            "overlaps another or leaves a gap",
        ),
        ({"a": entry("U8", [4], 2, 6)}, "overlaps another or leaves a gap"),
        ({"a": entry("U8", [2], 0, 2)}, "truncated or damaged"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    write_raw(tmp_path / "model.safetensors", header, b"\0" * 6)
    with pytest.raises(CheckpointError, match=message) as caught:
        CheckpointReader(tmp_path)
    assert "model.safetensors" in str(caught.value)


@given(data=st.data())
def test_no_damage_to_a_header_escapes_as_another_error(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({"a": A, "b": B}, path)
        content = bytearray(path.read_bytes())
        length = 8 + int.from_bytes(content[:8], "little")
        for _ in range(data.draw(st.integers(1, 3))):
            position = data.draw(st.integers(0, length - 1))
            content[position] = data.draw(
                st.one_of(st.integers(0, 255), st.sampled_from(b'09[]{}"'))
            )
        path.write_bytes(content)
        try:
            reader = CheckpointReader(folder)
            for name in reader.names():
                assert reader.read(name).shape == reader.shape(name)
        except CheckpointError as error:
            assert "model.safetensors" in str(error)


def test_a_deeply_nested_header_is_refused(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", b"[" * 200_000)
    with pytest.raises(CheckpointError, match="broken safetensors header"):
        CheckpointReader(tmp_path)


def test_a_huge_header_length_is_refused_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        CheckpointReader(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"two\.safetensors: not found"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (
            {"a": "one.safetensors", "z": "two.safetensors"},
            r"two\.safetensors: tensor z is missing",
        ),
        ({"a": "two.safetensors", "b": "one.safetensors"}, "tensor a is missing"),
        ({"a": "../one.safetensors"}, "plain name"),
        ({"a": "/etc/passwd"}, "plain name"),
        ({"a": "sub/one.safetensors"}, "plain name"),
        ({"a": 3}, "plain name"),
        ({"a": ".."}, "not found"),
        ({}, "weight_map must be"),
        ([], "weight_map must be"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    tmp_path: Path, weight_map: Any, message: str
) -> None:
    write_shards(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"a": A, "b": B}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"two\.safetensors: tensor a is in one\.safetensors"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (None, "neither model.safetensors nor"),
        ("model-00001-of-00002.safetensors", "need their model.safetensors.index.json"),
        ("pytorch_model.bin", "convert the PyTorch files"),
    ],
)
def test_a_folder_without_weights_says_what_to_do(
    tmp_path: Path, file: str | None, message: str
) -> None:
    if file is not None:
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(tmp_path)


def test_a_path_that_is_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: not a folder"):
        CheckpointReader(tmp_path / "nowhere")
