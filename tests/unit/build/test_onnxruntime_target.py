from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper

from deepseek_triton.build.onnxruntime import build, rewrite
from deepseek_triton.build.ort_functions import CONTRIB_DOMAIN, ort_functions
from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.presets import PRESETS, preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.errors import BuildError
from deepseek_triton.export.functions import DOMAIN, functions_used
from deepseek_triton.export.portable import export_portable

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


@pytest.fixture(params=PRESETS)
def portable(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_random_checkpoint(tmp_path / "checkpoint", preset_config(request.param))
    spec = read_model_spec(tmp_path / "checkpoint")
    return export_portable(spec, CheckpointReader(tmp_path / "checkpoint"), tmp_path / "onnx")


def test_the_rewritten_model_has_the_inputs_that_the_runner_binds(portable: Path) -> None:
    build(portable)
    model = onnx.load_model(portable, load_external_data=False)
    layers = [f"kv_pool.{layer}" for layer in range(4)]
    assert {value.name for value in model.graph.input} == {
        *("input_ids", "positions", "block_tables", "slot_mapping", "logit_rows"),
        *layers,
    }
    outputs = [name.replace("pool", "pool_out") for name in layers]
    assert [value.name for value in model.graph.output] == ["logits", *outputs]
    onnx.checker.check_model(str(portable))


def test_every_pool_is_scattered_into_directly_and_read_from_the_output_alone(
    portable: Path,
) -> None:
    build(portable)
    model = onnx.load_model(portable, load_external_data=False)
    pools = [value.name for value in model.graph.input if value.name.startswith("kv_pool.")]
    for pool in pools:
        (writer,) = [node for node in model.graph.node if pool in node.input]
        assert writer.op_type == "ScatterND"
        assert list(writer.output) == [pool.replace("kv_pool", "kv_pool_out")]
        readers = [n.op_type for n in model.graph.node if writer.output[0] in n.input]
        assert readers == ["Gather"]


def test_every_call_is_inlined(portable: Path) -> None:
    build(portable)
    model = onnx.load_model(portable, load_external_data=False)
    assert not model.functions
    assert {node.domain for node in model.graph.node} == {"", CONTRIB_DOMAIN}
    experts = [n.op_type for n in model.graph.node if n.domain == CONTRIB_DOMAIN]
    assert experts.count("MoE") == 3


def test_no_unused_weight_is_left(portable: Path) -> None:
    build(portable)
    model = onnx.load_model(portable, load_external_data=False)
    used = {name for node in model.graph.node for name in node.input}
    used.update(value.name for value in model.graph.output)
    assert all(tensor.name in used for tensor in model.graph.initializer)


def test_weights_are_not_touched(portable: Path) -> None:
    weights = portable.with_name("weights.bin")
    before = weights.stat()
    build(portable)
    assert weights.stat() == before
    assert portable.stat().st_size < 200_000


def test_another_model_is_refused(portable: Path) -> None:
    build(portable)
    with pytest.raises(BuildError, match="not a portable model"):
        build(portable)
    with pytest.raises(BuildError, match="not a portable model"):
        rewrite(helper.make_model(helper.make_graph([], "empty", [], [])))


NUM_EXPERTS, TOP_K, WIDTH, HIDDEN = 6, 3, 16, 24


def experts_session(function: str) -> ort.InferenceSession:
    names = ("x", "expert_ids", "expert_weights", "gate_up", "down")
    attributes = {"num_experts": [NUM_EXPERTS], "top_k": [TOP_K]}
    if function == "ExpertsSparse":
        attributes["k"] = TOP_K  # type: ignore[assignment]
    node = helper.make_node(function, names, ["y"], domain=DOMAIN, **attributes)
    types = (FLOAT, INT64, FLOAT, FLOAT, FLOAT)
    inputs = [helper.make_tensor_value_info(n, t, None) for n, t in zip(names, types, strict=True)]
    graph = helper.make_graph(
        [node], function, inputs, [helper.make_tensor_value_info("y", FLOAT, None)]
    )
    ours = ort_functions()
    functions = [ours[function]] if function in ours else functions_used([node])
    imports = [helper.make_opsetid(d, v) for d, v in (("", 21), (DOMAIN, 1), (CONTRIB_DOMAIN, 1))]
    model = helper.make_model(graph, functions=functions, opset_imports=imports, ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def expert_inputs(weights: NDArray[np.float32]) -> dict[str, NDArray[np.float32 | np.int64]]:
    rng = np.random.default_rng(0)
    shapes = {
        "x": (len(weights), WIDTH),
        "gate_up": (NUM_EXPERTS, 2 * HIDDEN, WIDTH),
        "down": (NUM_EXPERTS, WIDTH, HIDDEN),
    }
    tensors = {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
    ids = np.stack([rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in weights])
    return {**tensors, "expert_ids": ids, "expert_weights": weights}


@pytest.mark.parametrize(
    "weights",
    [
        np.random.default_rng(1).random((1, TOP_K)),
        np.random.default_rng(2).random((33, TOP_K)) * 2.5,
        np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.7], [1e-30, 1e-3, 1.0]]),
        np.array([[0.0, 0.0, 0.0]]),
        np.array([[16.0, 16.0, 16.0], [1e-20, 1e-20, 1e-20]]),
    ],
    ids=["one", "many", "some_zero", "all_zero", "extreme"],
)
def test_sparse_experts_equal_the_portable_body(weights: NDArray[np.float64]) -> None:
    inputs = expert_inputs(weights.astype(np.float32))
    expected = experts_session("Experts").run(None, inputs)[0]
    found = experts_session("ExpertsSparse").run(None, inputs)[0]
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, atol=1e-6 * scale)
