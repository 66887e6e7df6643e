from __future__ import annotations

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from deepseek_triton.checkpoint import reader as reader_module
from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.fp8 import dequantize_fp8
from deepseek_triton.checkpoint.names import validate_checkpoint
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.checkpoint.writer import LazyTensor, write_safetensors
from deepseek_triton.errors import CheckpointError
from deepseek_triton.quantize.checkpoint import open_checkpoint

FP8 = ml_dtypes.float8_e4m3fn
CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}


def test_values_are_codes_times_the_scale_of_their_block() -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(200, 300)).astype(FP8)  # both last blocks are partial
    scales = rng.uniform(0.5, 2, (2, 3)).astype(np.float32)
    values = dequantize_fp8(weight, scales, (128, 128))
    for n, k in [(0, 0), (127, 127), (128, 127), (127, 128), (199, 299), (5, 256)]:
        assert values[n, k] == np.float32(weight[n, k]) * scales[n // 128, k // 128]


@pytest.mark.parametrize("place", [slice(0, 3), slice(30, 130), slice(127, 129), slice(190, 220)])
def test_some_rows_have_the_values_that_they_have_among_all(place: slice) -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(200, 300)).astype(FP8)
    scales = rng.uniform(0.5, 2, (4, 3)).astype(np.float32)
    whole = dequantize_fp8(weight, scales, (64, 128))
    np.testing.assert_array_equal(dequantize_fp8(weight, scales, (64, 128), place), whole[place])


def test_every_code_has_the_value_of_the_format() -> None:
    codes = np.arange(256, dtype=np.uint8).view(FP8)[None]
    values = dequantize_fp8(codes, np.ones((1, 2), np.float32), (128, 128))
    assert values[0, 0x7E] == 448.0  # the largest: 1.75 · 2⁸
    assert values[0, 0x01] == 2.0**-9  # the smallest
    assert values[0, 0xC0] == -2.0
    assert np.isnan(values[0, [0x7F, 0xFF]]).all()
    np.testing.assert_array_equal(values, codes.astype(np.float32))


@pytest.fixture
def fp8_checkpoint(tmp_path: Path) -> Path:
    """A random checkpoint whose projections are FP8 as DeepSeek writes them."""
    source = write_random_checkpoint(
        tmp_path / "source", preset_config("v3") | {"hidden_size": 160}
    )
    reader, tensors = CheckpointReader(source), {}
    for name in reader.names():
        array = np.array(reader.read(name), np.float32)
        if not name.endswith("_proj.weight"):
            tensors[name] = array
            continue
        blocks = tuple(-(-size // 128) for size in array.shape)
        scales = np.random.default_rng(len(tensors)).uniform(0.001, 0.004, blocks)
        tensors[name] = (array / 0.002).astype(FP8)
        tensors[f"{name}_scale_inv"] = scales.astype(np.float32)
    folder = tmp_path / "fp8"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    return folder


def test_a_checkpoint_in_fp8_reads_like_a_dense_one(fp8_checkpoint: Path) -> None:
    spec = read_model_spec(fp8_checkpoint)
    reader = open_checkpoint(fp8_checkpoint, spec)
    validate_checkpoint(reader, spec)
    stored = CheckpointReader(fp8_checkpoint)
    name = "model.layers.1.self_attn.o_proj.weight"
    scales = stored.read(f"{name}_scale_inv")
    rows, columns = stored.shape(name)
    expanded = np.kron(scales, np.ones((128, 128), np.float32))[:rows, :columns]
    expected = stored.read(name).astype(np.float32) * expanded
    np.testing.assert_array_equal(reader.require(name, (rows, columns)), expected)
    assert not any(name.endswith("_scale_inv") for name in reader.names())


def test_blocks_hold_the_rows_of_the_whole(
    fp8_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_model_spec(fp8_checkpoint)
    reader = open_checkpoint(fp8_checkpoint, spec)
    for kind in ("mlp.gate_proj.weight", "input_layernorm.weight"):  # FP8, and not
        name = f"model.layers.0.{kind}"
        shape = reader.shape(name)
        monkeypatch.setattr(reader_module, "_BLOCK_VALUES", 100 * math.prod(shape[1:]))
        blocks = [block() for block in reader.blocks(name, shape)]
        assert [len(block) for block in blocks[:-1]] == [100] * ((shape[0] - 1) // 100)
        np.testing.assert_array_equal(np.concatenate(blocks), reader.require(name, shape))
    with pytest.raises(CheckpointError, match=r"input_layernorm.weight has shape \[160\]"):
        next(reader.blocks(name, (161,)))


def test_scales_may_follow_their_weights_in_the_file(fp8_checkpoint: Path) -> None:
    reader = CheckpointReader(fp8_checkpoint)
    names = sorted(reader.names())  # a scale's name is its weight's, and longer
    tensors = [LazyTensor(n, reader.dtype(n), reader.shape(n), [reader.read(n)]) for n in names]
    spec = read_model_spec(fp8_checkpoint)
    name = "model.layers.0.mlp.up_proj.weight"
    expected = open_checkpoint(fp8_checkpoint, spec).read(name)
    rewritten = fp8_checkpoint / "rewritten.safetensors"
    write_safetensors(rewritten, tensors, reader.release)
    rewritten.rename(fp8_checkpoint / "model.safetensors")
    found = open_checkpoint(fp8_checkpoint, spec).read(name)
    np.testing.assert_array_equal(found, expected)


def test_a_missing_scale_is_named(tmp_path: Path, fp8_checkpoint: Path) -> None:
    stored = CheckpointReader(fp8_checkpoint)
    tensors = {name: np.array(stored.read(name)) for name in stored.names()}
    lost = "model.layers.0.mlp.up_proj.weight_scale_inv"
    del tensors[lost]
    save_file(tensors, fp8_checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"its scales {lost} are missing"):
        open_checkpoint(fp8_checkpoint, read_model_spec(fp8_checkpoint))


def test_scales_of_other_blocks_are_refused(tmp_path: Path, fp8_checkpoint: Path) -> None:
    stored = CheckpointReader(fp8_checkpoint)
    tensors = {name: np.array(stored.read(name)) for name in stored.names()}
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = np.ones((9, 9), np.float32)
    save_file(tensors, fp8_checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has shape \[9, 9\], .* belongs to"):
        open_checkpoint(fp8_checkpoint, read_model_spec(fp8_checkpoint))


def test_scales_that_are_not_finite_are_refused_by_name(fp8_checkpoint: Path) -> None:
    stored = CheckpointReader(fp8_checkpoint)
    tensors = {name: np.array(stored.read(name)) for name in stored.names()}
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[f"{name}_scale_inv"][0, 1] = np.inf
    save_file(tensors, fp8_checkpoint / "model.safetensors")
    reader = open_checkpoint(fp8_checkpoint, read_model_spec(fp8_checkpoint))
    message = rf"{name}_scale_inv has 1 scales that are not finite, the first inf at \[0, 1\]"
    with pytest.raises(CheckpointError, match=message):
        reader.read(name)


def test_fp8_weights_need_a_config_that_says_so(fp8_checkpoint: Path) -> None:
    config = json.loads((fp8_checkpoint / "config.json").read_text())
    del config["quantization_config"]
    (fp8_checkpoint / "config.json").write_text(json.dumps(config))
    spec = read_model_spec(fp8_checkpoint)
    with pytest.raises(CheckpointError, match="float8_e4m3fn is not supported"):
        validate_checkpoint(open_checkpoint(fp8_checkpoint, spec), spec)
