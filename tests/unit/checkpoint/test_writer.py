from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from deepseek_triton.checkpoint import writer
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.checkpoint.writer import LazyTensor, require_space, write_safetensors
from deepseek_triton.errors import BuildError


def nothing() -> None:
    """Stand for a reader without mapped pages."""


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "uint8", "int32"])
def test_a_file_reads_back_with_the_reference_library(tmp_path: Path, dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype) if dtype == "bfloat16" else dtype)
    values = np.arange(24).reshape(2, 3, 4)
    tensors = [
        LazyTensor("a", kind, (2, 3, 4), (block for block in values)),
        LazyTensor("b.weight", kind, (5,), [np.arange(2), np.arange(3)]),
    ]
    path = tmp_path / "model.safetensors"
    write_safetensors(path, tensors, nothing, {"made": "here"})
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"made": "here"}
        np.testing.assert_array_equal(file.get_tensor("a").double().numpy(), values)
        assert file.get_tensor("b.weight").tolist() == [0, 1, 0, 1, 2]
    reader = CheckpointReader(tmp_path)
    assert reader.dtype("a") == kind
    np.testing.assert_array_equal(reader.read("a").astype(np.float64), values)


def test_large_blocks_go_out_in_chunks_and_input_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PIECE_BYTES", 16)
    monkeypatch.setattr(writer, "_RELEASE_BYTES", 32)
    released = []
    values = np.arange(40, dtype=np.float32)
    tensor = LazyTensor("a", np.dtype(np.float32), (40,), [values])
    write_safetensors(tmp_path / "model.safetensors", [tensor], lambda: released.append(1))
    assert len(released) >= 5
    np.testing.assert_array_equal(CheckpointReader(tmp_path).read("a"), values)


def test_blocks_that_do_not_fill_the_shape_are_an_error(tmp_path: Path) -> None:
    tensor = LazyTensor("a", np.dtype(np.float32), (3,), [np.zeros(2)])
    with pytest.raises(ValueError, match="a: blocks hold 8 bytes of 12"):
        write_safetensors(tmp_path / "x.safetensors", [tensor], nothing)


def test_a_value_that_float16_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    values = np.array([1, -65520], np.float32)
    tensor = LazyTensor("layers.3.weight", np.dtype(np.float16), (2,), [values])
    with pytest.raises(BuildError, match=r"layers\.3\.weight: .* beyond the range of fp16"):
        write_safetensors(tmp_path / "x.safetensors", [tensor], nothing)


def test_a_disk_without_room_is_refused_with_both_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9_100_000_000))
    require_space(tmp_path, 9_100_000_000)
    with pytest.raises(BuildError) as caught:
        require_space(tmp_path, 1_342_266_400_000)
    assert str(caught.value).startswith(
        f"{tmp_path}: 1,342.3 GB are to be written, 9.1 GB of the disk are free; "
    )
