from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from deepseek_triton.build.graph_passes import cancelling_pairs
from deepseek_triton.build.trt_graph import build
from deepseek_triton.calibrate.quantize import QuantizeOptions, quantize_checkpoint
from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.presets import PRESETS, preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.errors import BuildError
from deepseek_triton.export.functions import DOMAIN, function_library
from deepseek_triton.export.portable import export_portable
from deepseek_triton.quantize.checkpoint import open_checkpoint
from tests.unit.build.test_graph_passes import step_inputs

FLOAT, UINT4, INT4 = onnx.TensorProto.FLOAT, onnx.TensorProto.UINT4, onnx.TensorProto.INT4


def session_of(path: Path) -> ort.InferenceSession:
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module", params=PRESETS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    return write_random_checkpoint(folder / "checkpoint", preset_config(request.param))


def export(checkpoint: Path, folder: Path, precision: str = "fp32") -> Path:
    spec = read_model_spec(checkpoint)
    reader = open_checkpoint(checkpoint, spec)
    return export_portable(spec, reader, folder, precision=precision)


def test_the_rewritten_model_computes_what_the_portable_one_does(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = export(checkpoint, tmp_path / "onnx")
    inputs = step_inputs(onnx.load_model(path, load_external_data=False))
    expected = session_of(path).run(None, inputs)
    build(path)
    onnx.checker.check_model(path, full_check=True)
    for before, after in zip(expected, session_of(path).run(None, inputs), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_every_node_is_standard_typed_and_named_after_its_call(
    checkpoint: Path, tmp_path: Path, precision: str
) -> None:
    path = export(checkpoint, tmp_path / "onnx", precision)
    build(path)
    model = onnx.load_model(path, load_external_data=False)
    assert not model.functions and {node.domain for node in model.graph.node} == {""}
    assert not [node.name for node in model.graph.node if node.op_type == "CastLike"]
    assert cancelling_pairs(model) == []
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)
    scores = [name for name in names if "cached_scores" in name]
    assert len(scores) == 4 and scores[3].startswith("layers.3.attention/")
    types = {v.name: v.type.tensor_type.elem_type for v in model.graph.output}
    assert types.pop("logits") == types.pop("squared_norms") == FLOAT
    assert set(types.values()) == {helper.np_dtype_to_tensor_dtype(np.dtype("float16"))} or (
        precision == "bf16" and set(types.values()) == {onnx.TensorProto.BFLOAT16}
    )
    onnx.checker.check_model(path, full_check=True)


def test_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = export(checkpoint, tmp_path / "onnx")
    build(path)
    with pytest.raises(BuildError, match="not a portable model"):
        build(path)


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_quantised_checkpoint_gives_the_numbers_of_its_portable_model(
    tmp_path: Path, symmetric: bool
) -> None:
    config = preset_config("v3") | {"moe_intermediate_size": 64}
    checkpoint = write_random_checkpoint(tmp_path / "checkpoint", config)
    options = QuantizeOptions(method="rtn", group_size=32, symmetric=symmetric)
    quantize_checkpoint(checkpoint, tmp_path / "int4", options, [])
    path = export(tmp_path / "int4", tmp_path / "onnx")
    calls = onnx.load_model(path, load_external_data=False).graph.node
    kinds = {node.op_type for node in calls}
    assert {"LinearInt4", "ExpertsInt4"} < kinds
    inputs = step_inputs(onnx.load_model(path, load_external_data=False))
    expected = session_of(path).run(None, inputs)
    build(path)
    model = onnx.load_model(path, load_external_data=False)
    assert UINT4 not in {tensor.data_type for tensor in model.graph.initializer}
    for before, after in zip(expected, session_of(path).run(None, inputs), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=2e-4)


# INT4. T tokens, E experts of F hidden units over D columns.
T, E, D, F, BLOCK, TOP_K = 5, 3, 64, 128, 32, 2


def packed(values: NDArray[np.integer], name: str, kind: int = UINT4) -> onnx.TensorProto:
    flat = values.reshape(-1).astype(np.uint8)
    flat = np.append(flat, np.zeros(flat.size % 2, np.uint8))
    raw = (flat[::2] | flat[1::2] << 4).tobytes()
    return helper.make_tensor(name, kind, values.shape, raw, raw=True)


class Int4:
    """Random codes, scales and zero points of a weight whose last axis has blocks."""

    def __init__(self, rng: np.random.Generator, *shape: int, symmetric: bool, dtype: str) -> None:
        self.shape = shape
        blocks = (*shape[:-1], shape[-1] // BLOCK)
        self.codes = rng.integers(0, 16, shape)
        self.scales = (rng.random(blocks) / shape[-1]).astype(dtype)
        self.zeros = np.full(blocks, 8) if symmetric else rng.integers(0, 16, blocks)

    def tensors(self, name: str) -> list[onnx.TensorProto]:
        return [
            packed(self.codes, f"{name}.codes"),
            numpy_helper.from_array(self.scales, f"{name}.scales"),
            packed(self.zeros, f"{name}.zero_points"),
        ]

    def values(self) -> NDArray[np.float32]:
        """(code − zero point) · scale, as the format defines it."""
        codes = self.codes.reshape(*self.zeros.shape, BLOCK) - self.zeros[..., None]
        values = codes * self.scales[..., None].astype(np.float32)
        return values.reshape(self.shape).astype(np.float32)


def int4_model(
    folder: Path, weights: dict[str, Int4], call: onnx.NodeProto, external: bool
) -> Path:
    """A portable model of one call whose output is `logits`."""
    tensors = [tensor for name, weight in weights.items() for tensor in weight.tensors(name)]
    initializers = {tensor.name for tensor in tensors}
    kinds = {"x": FLOAT, "expert_ids": onnx.TensorProto.INT64, "expert_weights": FLOAT}
    inputs = [
        helper.make_tensor_value_info(name, kinds[name], None)
        for name in call.input
        if name not in initializers
    ]
    output = helper.make_tensor_value_info("logits", FLOAT, None)
    graph = helper.make_graph([call], "int4", inputs, [output], tensors)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    functions = list(function_library().values())
    model = helper.make_model(graph, functions=functions, opset_imports=imports, ir_version=10)
    path = folder / "model.onnx"
    onnx.save_model(
        model,
        path,
        save_as_external_data=external,
        location="weights.bin",
        size_threshold=0,
    )
    return path


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_int4_linears_equal_the_dequantised_product(
    tmp_path: Path, symmetric: bool, external: bool
) -> None:
    rng = np.random.default_rng(0)
    weight = Int4(rng, 37, D, symmetric=symmetric, dtype="float32")
    call = helper.make_node(
        "LinearInt4",
        ["x", "w.codes", "w.scales", "w.zero_points"],
        ["logits"],
        name="layers.0.o",
        domain=DOMAIN,
        group_size=BLOCK,
        symmetric=int(symmetric),
    )
    path = int4_model(tmp_path, {"w": weight}, call, external)
    build(path)
    model = onnx.load_model(path)
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert kinds["w.codes"] == INT4 and UINT4 not in kinds.values()
    assert all(len(n.input) == 2 for n in model.graph.node if n.op_type == "DequantizeLinear")
    x = rng.standard_normal((T, D)).astype(np.float32)
    (found,) = session_of(path).run(None, {"x": x})
    np.testing.assert_allclose(found, x @ weight.values().T, atol=1e-5)


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_int4_experts_equal_the_dequantised_sum(
    tmp_path: Path, symmetric: bool, external: bool
) -> None:
    rng = np.random.default_rng(1)
    gate_up = Int4(rng, E, 2 * F, D, symmetric=symmetric, dtype="float32")
    down = Int4(rng, E, D, F, symmetric=symmetric, dtype="float32")
    names = [f"{w}.{part}" for w in ("a", "b") for part in ("codes", "scales", "zero_points")]
    call = helper.make_node(
        "ExpertsInt4",
        ["x", "expert_ids", "expert_weights", *names],
        ["logits"],
        name="layers.1.mlp.experts",
        domain=DOMAIN,
        num_experts=[E],
        top_k=[TOP_K],
        group_size=BLOCK,
        symmetric=int(symmetric),
    )
    path = int4_model(tmp_path, {"a": gate_up, "b": down}, call, external)
    build(path)
    inputs = {
        "x": rng.standard_normal((T, D)).astype(np.float32),
        "expert_ids": np.stack([rng.permutation(E)[:TOP_K] for _ in range(T)]),
        "expert_weights": rng.random((T, TOP_K)).astype(np.float32),
    }
    (found,) = session_of(path).run(None, inputs)
    expected = np.zeros((T, D), np.float32)
    for token in range(T):
        chosen = zip(inputs["expert_ids"][token], inputs["expert_weights"][token], strict=True)
        for expert, weight in chosen:
            both = gate_up.values()[expert] @ inputs["x"][token]
            gate, up = both[::2], both[1::2]
            hidden = gate / (1 + np.exp(-gate)) * up
            expected[token] += weight * (down.values()[expert] @ hidden)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_blocks_that_do_not_fill_a_row_are_refused_by_name(tmp_path: Path) -> None:
    weight = Int4(np.random.default_rng(0), 4, D, symmetric=True, dtype="float32")
    call = helper.make_node(
        "LinearInt4",
        ["x", "w.codes", "w.scales", "w.zero_points"],
        ["logits"],
        name="layers.0.o",
        domain=DOMAIN,
        group_size=48,
        symmetric=1,
    )
    path = int4_model(tmp_path, {"w": weight}, call, external=False)
    with pytest.raises(BuildError, match=r"layers.0.o: w.codes has 64 columns.*blocks of 48"):
        build(path)
