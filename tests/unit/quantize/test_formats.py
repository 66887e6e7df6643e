from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.errors import CheckpointError, UnsupportedModelError
from deepseek_triton.quantize.checkpoint import open_checkpoint
from deepseek_triton.quantize.int4 import Int4Weight
from tests.unit.quantize.stored import (
    AWQ_CONFIG as AWQ,
)
from tests.unit.quantize.stored import (
    GPTQ_CONFIG as GPTQ,
)
from tests.unit.quantize.stored import (
    Layer,
    Tensors,
    awq,
    gptq,
    pack_quantized,
    packed_config,
    random_layer,
)

SOURCE = "model.layers.0.mlp.down_proj"


def opened(folder: Path, tensors: Tensors, quantization: dict[str, Any]) -> CheckpointReader:
    save_file(tensors, folder / "model.safetensors")
    config = preset_config("v2-lite") | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder, read_model_spec(folder))


def check(reader: CheckpointReader, layer: Layer) -> Int4Weight:
    """Compare what is read with the formula; return it."""
    shape = layer.codes.shape
    assert reader.names() == (f"{SOURCE}.weight",)
    assert reader.shape(f"{SOURCE}.weight") == shape
    weight = reader.linear(SOURCE, shape)
    assert isinstance(weight, Int4Weight)
    np.testing.assert_array_equal(weight.dequantize(), layer.values())
    np.testing.assert_array_equal(reader.require(f"{SOURCE}.weight", shape), layer.values())
    return weight


@pytest.mark.parametrize(("columns", "group_size"), [(64, 32), (128, 64), (256, 128), (96, -1)])
def test_autoawq(tmp_path: Path, columns: int, group_size: int) -> None:
    layer = random_layer(24, columns, columns if group_size < 0 else group_size)
    config = AWQ | {"group_size": group_size}
    weight = check(opened(tmp_path, awq(SOURCE, layer), config), layer)
    np.testing.assert_array_equal(weight.codes, layer.codes)
    np.testing.assert_array_equal(weight.zero_points, layer.zeros)


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize(("columns", "group_size"), [(64, 32), (128, 64), (256, 128), (96, -1)])
def test_gptq(tmp_path: Path, columns: int, group_size: int, v2: bool) -> None:
    layer = random_layer(20, columns, columns if group_size < 0 else group_size)
    config = GPTQ | {"group_size": group_size, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    reader = opened(tmp_path, gptq(SOURCE, layer, v2=v2, g_idx=v2), config)
    assert check(reader, layer).input_order is None


def test_gptq_with_act_order_gathers_each_group(tmp_path: Path) -> None:
    layer = random_layer(16, 96, 32, order=True)
    weight = check(opened(tmp_path, gptq(SOURCE, layer), GPTQ | {"desc_act": True}), layer)
    order = weight.input_order
    assert order is not None
    np.testing.assert_array_equal(layer.group[order], np.arange(96) // 32)
    np.testing.assert_array_equal(weight.codes, layer.codes[:, order])


def test_gptq_whose_inputs_do_not_fill_the_groups(tmp_path: Path) -> None:
    layer = random_layer(8, 80, 32)
    check(opened(tmp_path, gptq(SOURCE, layer), GPTQ), layer)


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_is_symmetric_if_all_its_zero_points_say_so(tmp_path: Path, symmetric: bool) -> None:
    layer = random_layer(8, 64, 32, symmetric=symmetric)
    reader = opened(tmp_path, gptq(SOURCE, layer), GPTQ | {"sym": True})
    assert (check(reader, layer).zero_points is None) == symmetric


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("columns", "group_size"), [(64, 32), (100, 32), (256, 128), (60, None)])
def test_compressed_tensors(
    tmp_path: Path, columns: int, group_size: int | None, symmetric: bool
) -> None:
    layer = random_layer(20, columns, group_size or columns, symmetric=symmetric)
    strategy = "group" if group_size else "channel"
    config = packed_config(strategy=strategy, group_size=group_size, symmetric=symmetric)
    reader = opened(tmp_path, pack_quantized(SOURCE, layer, symmetric=symmetric), config)
    assert (check(reader, layer).zero_points is None) == symmetric


def test_compressed_tensors_with_zero_points_in_bytes(tmp_path: Path) -> None:
    layer = random_layer(20, 64, 32)
    check(opened(tmp_path, pack_quantized(SOURCE, layer, packed=False), packed_config()), layer)


def test_compressed_tensors_with_inputs_assigned_to_groups(tmp_path: Path) -> None:
    layer = random_layer(16, 96, 32, order=True)
    tensors = pack_quantized(SOURCE, layer, order=True)
    assert (
        check(opened(tmp_path, tensors, packed_config(actorder="group")), layer).input_order
        is not None
    )


def test_compressed_tensors_with_weight_order_has_plain_groups(tmp_path: Path) -> None:
    layer = random_layer(16, 96, 32)
    config = packed_config(actorder="weight")
    assert check(opened(tmp_path, pack_quantized(SOURCE, layer), config), layer).input_order is None


def test_the_group_that_names_a_layer_best_decides(tmp_path: Path) -> None:
    layer = random_layer(16, 128, 64)
    config = packed_config()
    coarser = packed_config(group_size=64)["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = coarser | {"targets": ["re:.*down_proj$"]}
    check(opened(tmp_path, pack_quantized(SOURCE, layer), config), layer)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (AWQ | {"bits": 8}, "bits 8 is not supported, only 4 is"),
    (AWQ | {"version": "gemv"}, 'version "gemv" is not supported'),
    (AWQ | {"version": "GEMV_fast"}, "gemv_fast"),
    (GPTQ | {"bits": 3}, "bits 3"),
    (GPTQ | {"checkpoint_format": "marlin"}, "marlin"),
    (GPTQ | {"dynamic": {"+:.*down_proj": {"bits": 8}}}, "settings for single layers"),
    (packed_config(num_bits=8), "num_bits 8 is not supported; it must be 4"),
    (packed_config(type="float"), 'type "float"'),
    (packed_config(strategy="tensor"), 'strategy "tensor"'),
    (packed_config() | {"format": "marlin-24"}, "marlin-24"),
    ({"quant_method": "bitsandbytes", "bits": 4}, "bitsandbytes.*supported are fp8, awq, gptq"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
    ({"quant_method": "fp8"}, "without weight_block_size"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_is_not_read_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        opened(tmp_path, {"x": np.zeros(1, np.float32)}, config)


def changed(tensors: Tensors, part: str, value: Any) -> Tensors:
    changed = {**tensors, f"{SOURCE}.{part}": value}
    return {name: array for name, array in changed.items() if array is not None}


LAYER = random_layer(16, 64, 32)
BROKEN: list[tuple[Tensors, dict[str, Any], str]] = [
    (changed(awq(SOURCE, LAYER), "qzeros", None), AWQ, "qzeros is missing"),
    (awq(SOURCE, LAYER), AWQ | {"group_size": 64}, r"qzeros has shape \[2, 2\], expected \[1, 2\]"),
    (changed(gptq(SOURCE, LAYER), "scales", None), GPTQ, "scales is missing"),
    (
        changed(gptq(SOURCE, LAYER), "g_idx", np.zeros(64, np.int32)),
        GPTQ,
        "g_idx: 64 inputs are not in groups of 32 each",
    ),
    (
        changed(gptq(SOURCE, LAYER), "qweight", np.zeros((8, 16), np.int64)),
        GPTQ,
        "qweight is int64, expected int32",
    ),
    (
        changed(pack_quantized(SOURCE, LAYER), "weight_zero_point", None),
        packed_config(),
        "weight_zero_point is missing",
    ),
    (
        pack_quantized(SOURCE, LAYER),
        packed_config() | {"ignore": ["re:.*down_proj"]},
        "is INT4, but .*ignore names it",
    ),
    (
        changed(pack_quantized(SOURCE, LAYER), "weight_shape", np.array([16, 72])),
        packed_config(),
        r"weight_packed has shape \[16, 8\], expected \[16, 9\]",
    ),
]


@pytest.mark.parametrize(("tensors", "config", "message"), BROKEN)
def test_parts_that_do_not_belong_together_are_refused(
    tmp_path: Path, tensors: Tensors, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path, tensors, config)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("tensors", "config", "part", "at"),
    [
        (awq(SOURCE, LAYER), AWQ, "scales", [1, 5]),
        (gptq(SOURCE, LAYER), GPTQ, "scales", [1, 5]),
        (pack_quantized(SOURCE, LAYER), packed_config(), "weight_scale", [5, 1]),
    ],
    ids=["awq", "gptq", "compressed-tensors"],
)
def test_scales_that_are_not_finite_are_refused_by_name(
    tmp_path: Path,
    tensors: Tensors,
    config: dict[str, Any],
    part: str,
    at: list[int],
    dtype: Any,
    value: float,
) -> None:
    scales = tensors[f"{SOURCE}.{part}"].astype(dtype)
    scales[tuple(at)] = value
    reader = opened(tmp_path, changed(tensors, part, scales), config)
    layer = reader.int4(SOURCE)
    assert layer is not None
    message = f"{SOURCE}.{part} has 1 scales that are not finite, the first {value} at {at}"
    with pytest.raises(CheckpointError, match=re.escape(message) + ".*quantise it anew"):
        layer.scales()
    with pytest.raises(CheckpointError, match=re.escape(message)):
        reader.require(f"{SOURCE}.weight", (16, 64))


def test_a_layer_whose_shape_is_not_the_configs_is_refused(tmp_path: Path) -> None:
    reader = opened(tmp_path, awq(SOURCE, LAYER), AWQ)
    with pytest.raises(CheckpointError, match=r"shape \[16, 64\], config.json asks for \[16, 32\]"):
        reader.linear(SOURCE, (16, 32))
