from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest

from deepseek_triton.errors import BuildError
from deepseek_triton.export import weights
from deepseek_triton.export.weights import ALIGNMENT, WeightFile, interleave_rows

FLOAT = np.dtype(np.float32)


def nothing() -> None:
    """Stand for a reader without mapped pages."""


def read_back(file: WeightFile, path: Path) -> dict[str, np.ndarray]:
    arrays = {}
    for tensor in file.tensors(path.name):
        arrays[tensor.name] = onnx.numpy_helper.to_array(tensor, base_dir=str(path.parent))
    return arrays


def test_weights_come_back_by_name_from_aligned_offsets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    expected = {f"w{i}": rng.normal(size=(3, i + 1)).astype(np.float32) for i in range(4)}
    file = WeightFile()
    for name, array in expected.items():
        file.add(name, array.shape, FLOAT, [array])
    path = tmp_path / "weights.bin"
    file.write(path, nothing)
    assert path.stat().st_size == file.nbytes
    found = read_back(file, path)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    for tensor in file.tensors("weights.bin"):
        offset = next(int(e.value) for e in tensor.external_data if e.key == "offset")
        assert offset % ALIGNMENT == 0


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_other_dtypes_are_converted(tmp_path: Path, dtype: type) -> None:
    source = np.array([[1.5, -2.0], [0.25, 384.0]]).astype(dtype)
    file = WeightFile()
    file.add("w", (2, 2), FLOAT, [source])
    file.write(tmp_path / "weights.bin", nothing)
    found = read_back(file, tmp_path / "weights.bin")["w"]
    np.testing.assert_array_equal(found, source.astype(np.float32))


def test_blocks_follow_one_another_whatever_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", 12)  # three elements at a time
    source = np.arange(20, dtype=np.float32).reshape(5, 4)
    file = WeightFile()
    file.add("w", (5, 4), FLOAT, (block for block in (source[:2], source[2:])))
    file.write(tmp_path / "weights.bin", nothing)
    np.testing.assert_array_equal(read_back(file, tmp_path / "weights.bin")["w"], source)


def test_strided_blocks_are_written_in_c_order(tmp_path: Path) -> None:
    source = np.arange(12, dtype=np.float32).reshape(3, 4)
    file = WeightFile()
    file.add("w", (4, 3), FLOAT, [source.T])
    file.write(tmp_path / "weights.bin", nothing)
    np.testing.assert_array_equal(read_back(file, tmp_path / "weights.bin")["w"], source.T)


@pytest.mark.parametrize("rows", [1, 3])
def test_blocks_that_do_not_fill_the_shape_are_an_error(tmp_path: Path, rows: int) -> None:
    file = WeightFile()
    file.add("w", (2, 4), FLOAT, [np.zeros((rows, 4), np.float32)])
    with pytest.raises(ValueError, match="^w: blocks hold"):
        file.write(tmp_path / "weights.bin", nothing)


def test_mapped_pages_are_released_as_writing_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", 100)
    monkeypatch.setattr(weights, "_RELEASE_BYTES", 400)
    file = WeightFile()
    file.add("w", (400,), FLOAT, [np.zeros(400, np.float32)])
    calls: list[None] = []
    file.write(tmp_path / "weights.bin", lambda: calls.append(None))
    assert len(calls) == 1600 // 400 + 1


def test_interleaved_rows_take_turns() -> None:
    gate = np.arange(10, dtype=np.float32).reshape(5, 2)
    up = gate + 100
    places = (slice(0, 2), slice(2, 4), slice(4, 5))
    first, second = ([partial(np.take, m, np.r_[p], 0) for p in places] for m in (gate, up))
    blocks = [block().reshape(-1, 2) for block in interleave_rows(first, second)]
    assert len(blocks) == 3
    rows = np.concatenate(blocks)
    np.testing.assert_array_equal(rows[0::2], gate)
    np.testing.assert_array_equal(rows[1::2], up)


def test_blocks_are_read_side_by_side_and_written_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_WORKERS", 2)
    second_was_read = threading.Event()

    def first() -> np.ndarray:
        assert second_was_read.wait(60)
        return np.zeros((1, 4), np.float32)

    def second() -> np.ndarray:
        second_was_read.set()
        return np.ones((1, 4), np.float32)

    file = WeightFile()
    file.add("w", (2, 4), FLOAT, [first, second])
    file.write(tmp_path / "weights.bin", nothing)
    found = read_back(file, tmp_path / "weights.bin")["w"]
    np.testing.assert_array_equal(found, [[0] * 4, [1] * 4])


def test_few_blocks_wait_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_AHEAD", 3)
    monkeypatch.setattr(weights, "_RELEASE_BYTES", 4)  # so that each block written is seen
    begun, ahead = 0, []

    def blocks() -> Iterator[Callable[[], np.ndarray]]:
        nonlocal begun
        for _ in range(20):
            begun += 1
            yield lambda: np.zeros(1, np.float32)

    file = WeightFile()
    file.add("w", (20,), FLOAT, blocks())
    file.write(tmp_path / "weights.bin", lambda: ahead.append(begun - len(ahead)))
    assert max(ahead) == 4


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("large", [70000.0, -np.inf, np.nan])
def test_a_weight_beyond_float16_is_refused_by_name(
    tmp_path: Path, stored: type, large: float
) -> None:
    file = WeightFile()
    with np.errstate(over="ignore"):
        values = np.array([1.0, large, 65504.0]).astype(stored)
    file.add("layers.3.o.weight", (3,), np.dtype(np.float16), [values])
    reason = "is NaN" if large != large else r"is beyond the range of fp16 \(65504\); build with"
    with pytest.raises(BuildError, match=r"^layers\.3\.o\.weight: a weight " + reason):
        file.write(tmp_path / "weights.bin", nothing)
