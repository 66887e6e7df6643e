from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.errors import BuildError
from deepseek_triton.export.portable import WEIGHTS_FILE, export_portable
from deepseek_triton.export.weights import UINT4, WeightFile
from deepseek_triton.quantize.checkpoint import open_checkpoint
from tests.unit.quantize.stored import (
    AWQ_CONFIG,
    GPTQ_CONFIG,
    awq,
    gptq,
    pack_quantized,
    packed_config,
    write_int4_checkpoints,
)


def export(checkpoint: Path, out: Path) -> onnx.ModelProto:
    spec = read_model_spec(checkpoint)
    return onnx.load(export_portable(spec, open_checkpoint(checkpoint, spec), out, block_size=4))


def step_inputs(model: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    """One prefill of 5 tokens into empty pools of two blocks."""
    inputs: dict[str, NDArray[Any]] = {
        "input_ids": np.random.default_rng(0).integers(0, 100, (1, 5)).astype(np.int32),
        "positions": np.arange(5, dtype=np.int32)[None],
        "context_lens": np.zeros(1, np.int32),
        "block_tables": np.array([[0, 1]], np.int32),
        "last_token": np.array([4], np.int32),
    }
    for value in model.graph.input:
        if "_pool." in value.name:
            width = value.type.tensor_type.shape.dim[2].dim_value
            inputs[value.name] = np.zeros((2, 4, width), np.float32)
    return inputs


def logits(folder: Path, model: onnx.ModelProto) -> NDArray[np.float32]:
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    result: NDArray[np.float32] = session.run(["logits"], step_inputs(model))[0]
    return result


SMALL = {"num_hidden_layers": 2}
V2_LITE, V3, QWEN2 = (preset_config(arch) | SMALL for arch in ("v2-lite", "v3", "qwen2"))
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any, dict[str, Any]]] = {
    "awq, experts": (V2_LITE, AWQ_CONFIG, awq, {}),
    "gptq, experts": (V3, GPTQ_CONFIG | {"sym": True}, gptq, {"symmetric": True}),
    "gptq, act-order": (QWEN2, GPTQ_CONFIG, gptq, {"order": True}),
    "packed, biases": (QWEN2, packed_config(), pack_quantized, {}),
}


@pytest.fixture(params=CASES)
def models(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, onnx.ModelProto]:
    config, quantization, encode, layer = CASES[request.param]
    folders = write_int4_checkpoints(tmp_path, config, quantization, encode, **layer)
    return {folder.name: export(folder, tmp_path / f"{folder.name}-onnx") for folder in folders}


def test_the_portable_model_computes_what_the_dequantised_one_does(
    models: dict[str, onnx.ModelProto], tmp_path: Path
) -> None:
    for model in models.values():
        onnx.checker.check_model(model)
    found = logits(tmp_path / "int4-onnx", models["int4"])
    expected = logits(tmp_path / "dense-onnx", models["dense"])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert any(node.op_type == "LinearInt4" for node in models["int4"].graph.node)


def test_the_body_runs_in_the_onnx_reference_too(tmp_path: Path) -> None:
    config, quantization, encode, layer = CASES["awq, experts"]
    folders = write_int4_checkpoints(tmp_path, config, quantization, encode, **layer)
    for folder in folders:
        export(folder, tmp_path / f"{folder.name}-onnx")
    model = onnx.load(tmp_path / "int4-onnx" / "model.onnx")
    flat = onnx.inliner.inline_local_functions(model)
    (found,) = ReferenceEvaluator(flat).run(["logits"], step_inputs(model))
    expected = logits(tmp_path / "dense-onnx", model)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def calls(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def exported(tmp_path: Path, case: str, **changes: Any) -> onnx.ModelProto:
    config, quantization, encode, layer = CASES[case]
    int4, _ = write_int4_checkpoints(tmp_path, config, quantization | changes, encode, **layer)
    return export(int4, tmp_path / "onnx")


def test_projections_of_one_input_share_one_product(tmp_path: Path) -> None:
    model = exported(tmp_path, "packed, biases")
    # qkv, o, gate_up and down in each of two layers; the output layer stays as it is.
    assert calls(model)["LinearInt4"] == 8
    assert calls(model)["Linear"] == 1
    shapes = {t.name: tuple(t.dims) for t in model.graph.initializer}
    assert shapes["layers.0.mlp.gate_up.codes"] == (512, 128)
    assert shapes["layers.0.mlp.gate_up.scales"] == (512, 4)
    assert shapes["layers.0.mlp.gate_up.zero_points"] == (512, 4)
    types = {t.name: t.data_type for t in model.graph.initializer}
    assert types["layers.0.mlp.gate_up.codes"] == onnx.TensorProto.UINT4


def test_projections_of_different_input_order_stay_apart(tmp_path: Path) -> None:
    model = exported(tmp_path, "gptq, act-order")
    assert calls(model)["LinearInt4"] == 14  # q, k, v, o, gate, up and down in two layers
    gathered = [n for n in model.graph.node if n.op_type == "Gather" and "ordered" in n.name]
    assert len(gathered) == 14


def test_experts_are_one_call_with_rows_of_gate_and_up_in_turn(tmp_path: Path) -> None:
    model = exported(tmp_path, "awq, experts")
    (call,) = [node for node in model.graph.node if node.op_type == "ExpertsInt4"]
    tensors = {t.name: t for t in model.graph.initializer}
    codes = onnx.numpy_helper.to_array(tensors[call.input[3]]).astype(np.uint8)
    reader = open_checkpoint(tmp_path / "int4", read_model_spec(tmp_path / "int4"))
    for expert in (0, 7):
        source = f"model.layers.1.mlp.experts.{expert}."
        for place, name in enumerate(("gate_proj", "up_proj")):
            layer = reader.int4(source + name)
            assert layer is not None
            np.testing.assert_array_equal(codes[expert, place::2], layer.codes())


def test_a_scale_that_the_precision_cannot_hold_is_named_as_the_checkpoint_does(
    tmp_path: Path,
) -> None:
    int4, _ = write_int4_checkpoints(tmp_path, QWEN2, AWQ_CONFIG, awq)
    spec = read_model_spec(int4)
    reader, name = open_checkpoint(int4, spec), "model.layers.1.mlp.up_proj"
    layer = reader.int4(name)
    assert layer is not None
    reader._int4[name] = replace(layer, scales=lambda: 1e5 + layer.scales())
    with pytest.raises(BuildError, match=f"^{name}: a weight is beyond the range of fp16"):
        export_portable(spec, reader, tmp_path / "onnx", precision="fp16")


def test_experts_with_an_order_each_become_floating_point(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    int4, dense = write_int4_checkpoints(tmp_path, V2_LITE, GPTQ_CONFIG, gptq, order=True)
    with caplog.at_level(logging.WARNING):
        model = export(int4, tmp_path / "int4-onnx")
    assert "have an input order each; they become floating point" in caplog.text
    assert calls(model)["Experts"] == 1
    export(dense, tmp_path / "dense-onnx")
    found, expected = (logits(tmp_path / f"{kind}-onnx", model) for kind in ("int4", "dense"))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("blocks", [[5, 4], [3, 3, 3], [9]])
def test_codes_are_packed_across_the_ends_of_blocks(tmp_path: Path, blocks: list[int]) -> None:
    values = np.random.default_rng(0).integers(0, 16, 9).astype(np.uint8)
    file = WeightFile()
    file.add("codes", (3, 3), UINT4, np.split(values, np.cumsum(blocks)[:-1]))
    file.write(tmp_path / WEIGHTS_FILE, lambda: None)
    assert (tmp_path / WEIGHTS_FILE).stat().st_size == file.nbytes == 5
    (tensor,) = file.tensors(WEIGHTS_FILE)
    found = onnx.numpy_helper.to_array(tensor, base_dir=str(tmp_path))
    np.testing.assert_array_equal(found.astype(np.uint8).reshape(-1), values)
