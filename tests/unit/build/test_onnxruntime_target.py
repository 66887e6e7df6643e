from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from deepseek_triton.build.graph_passes import cancelling_pairs
from deepseek_triton.build.onnxruntime import CPU, _experts, _split_by_head, build, rewrite
from deepseek_triton.build.ort_functions import CONTRIB_DOMAIN, cpu_functions
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
    spec = read_model_spec(portable.parents[1] / "checkpoint")
    build(portable)
    model = onnx.load_model(portable, load_external_data=False)
    pools = [f"{pool}_pool.{layer}" for layer in range(4) for pool in spec.attention.pools]
    assert {value.name for value in model.graph.input} == {
        *("input_ids", "positions", "block_tables", "slot_mapping", "logit_rows"),
        *pools,
    }
    outputs = [name.replace("pool", "pool_out") for name in pools]
    assert [value.name for value in model.graph.output] == ["logits", "squared_norms", *outputs]
    onnx.checker.check_model(str(portable))


def test_every_pool_is_scattered_into_directly_and_read_from_the_output_alone(
    portable: Path,
) -> None:
    build(portable)
    model = onnx.load_model(portable, load_external_data=False)
    pools = [value.name for value in model.graph.input if "_pool." in value.name]
    assert pools
    for pool in pools:
        (writer,) = [node for node in model.graph.node if pool in node.input]
        assert writer.op_type == "ScatterND"
        assert list(writer.output) == [pool.replace("_pool", "_pool_out")]
        readers = [n.op_type for n in model.graph.node if writer.output[0] in n.input]
        assert readers == ["Gather"]


def test_every_call_is_inlined(portable: Path) -> None:
    spec = read_model_spec(portable.parents[1] / "checkpoint")
    build(portable)
    model = onnx.load_model(portable, load_external_data=False)
    assert not model.functions
    assert {node.domain for node in model.graph.node} == {"", CONTRIB_DOMAIN}
    experts = [n.op_type for n in model.graph.node if n.domain == CONTRIB_DOMAIN]
    assert experts.count("MoE") == len(spec.moe_layers)


def test_no_transpose_reshape_or_cast_is_left_that_a_pass_could_remove(portable: Path) -> None:
    build(portable)
    model = onnx.load_model(portable, load_external_data=False)
    assert cancelling_pairs(model) == []
    assert len(model.graph.node) < 520  # more than 560 without the passes


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
        rewrite(helper.make_model(helper.make_graph([], "empty", [], [])), CPU)


@pytest.mark.parametrize("portable", ["v2"], indirect=True)
def test_weights_of_a_head_are_its_bytes_in_the_file(portable: Path) -> None:
    stacked = load_weights(portable)["layers.2.attention.w_uk"]
    build(portable)
    weights = load_weights(portable)
    assert "layers.2.attention.w_uk" not in weights
    for head, expected in enumerate(stacked):
        np.testing.assert_array_equal(weights[f"layers.2.attention.w_uk.{head}"], expected)


def load_weights(path: Path) -> dict[str, NDArray[np.float32]]:
    model = onnx.load_model(path)
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def test_small_weights_inside_the_model_are_split_too() -> None:
    stacked = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    graph = onnx.GraphProto(initializer=[numpy_helper.from_array(stacked, "w")])
    assert _split_by_head(graph, "w") == ["w.0", "w.1"]
    for head in (0, 1):
        found = numpy_helper.to_array(graph.initializer[1 + head])
        np.testing.assert_array_equal(found, stacked[head])


NUM_EXPERTS, TOP_K, WIDTH, HIDDEN = 6, 4, 16, 24
FEW = 8  # twice the rows that name every expert, so that all of the kernel's cases are short


def experts_session(*functions: str) -> ort.InferenceSession:
    """A model of one mixture of experts: portable, or ours with its extra rows."""
    names = ["x", "expert_ids", "expert_weights", "gate_up", "down"]
    types = (FLOAT, INT64, FLOAT, FLOAT, FLOAT)
    inputs = [helper.make_tensor_value_info(n, t, None) for n, t in zip(names, types, strict=True)]
    graph = helper.make_graph(
        [], "experts", inputs, [helper.make_tensor_value_info("y", FLOAT, None)]
    )
    node = helper.make_node(
        "Experts", names, ["y"], domain=DOMAIN, num_experts=[NUM_EXPERTS], top_k=[TOP_K]
    )
    graph.node.append(node)
    library = functions_used([node])
    if "ExpertsSparse" in functions:
        _experts(graph, graph.node[0])
        graph.node[0].attribute[0].i = FEW
        graph.input.append(helper.make_tensor_value_info("input_ids", INT64, None))
        library = [function for name, function in cpu_functions(1).items() if name in functions]
    imports = [helper.make_opsetid(d, v) for d, v in (("", 21), (DOMAIN, 1), (CONTRIB_DOMAIN, 1))]
    model = helper.make_model(graph, functions=library, opset_imports=imports, ir_version=10)
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


def run_sparse(inputs: dict[str, NDArray[np.float32 | np.int64]]) -> NDArray[np.float32]:
    session = experts_session("ExpertsSparse", "ExtraRows")
    ids = np.zeros((len(inputs["x"]), 1), np.int64)
    result: NDArray[np.float32] = session.run(None, {**inputs, "input_ids": ids})[0]
    return result


@pytest.mark.parametrize(
    "weights",
    [
        np.random.default_rng(1).random((1, TOP_K)),
        np.random.default_rng(2).random((FEW - 1, TOP_K)) * 2.5,
        np.random.default_rng(2).random((FEW, TOP_K)) * 2.5,
        np.random.default_rng(2).random((33, TOP_K)) * 2.5,
        np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.7, 0.0], [1e-30, 1e-3, 1.0, 2.0]]),
        np.array([[0.0, 0.0, 0.0, 0.0]]),
        np.array([[16.0, 16.0, 16.0, 16.0], [1e-20, 1e-20, 1e-20, 1e-20]]),
    ],
    ids=["one", "repeated", "covered", "many", "some_zero", "all_zero", "extreme"],
)
def test_sparse_experts_equal_the_portable_body(weights: NDArray[np.float64]) -> None:
    inputs = expert_inputs(weights.astype(np.float32))
    expected = experts_session("Experts").run(None, inputs)[0]
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(run_sparse(inputs), expected, atol=1e-6 * scale)


def test_a_token_gets_the_same_bits_from_its_experts_whatever_its_company() -> None:
    inputs = expert_inputs(np.random.default_rng(3).random((40, TOP_K)).astype(np.float32))
    everyone = run_sparse(inputs)
    for begin, end in ((0, 1), (5, 7), (5, 5 + FEW), (0, 39)):
        part = {
            name: value[begin:end] if len(value) == 40 else value for name, value in inputs.items()
        }
        np.testing.assert_array_equal(run_sparse(part), everyone[begin:end])
