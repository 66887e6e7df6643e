from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from deepseek_triton.build.onnxruntime import NUM_BEST, _give_best, build_cuda
from deepseek_triton.build.ort_functions import cuda_functions
from deepseek_triton.build.targets import ONNXRUNTIME_GPU
from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.presets import PRESETS, preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.errors import BuildError
from deepseek_triton.export.portable import export_portable
from deepseek_triton.quantize.checkpoint import open_checkpoint
from tests.unit.quantize.stored import AWQ_CONFIG, awq, write_int4_checkpoints

HALF = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
# The provider computes these with cuDNN, which serving does without.
NEED_CUDNN = {"ReduceMax", "ReduceMin", "ReduceMean", "ReduceLogSumExp", "ArgMax", "ArgMin"}


def portable(folder: Path, preset: str, precision: str) -> Path:
    write_random_checkpoint(folder / "checkpoint", preset_config(preset))
    spec = read_model_spec(folder / "checkpoint")
    reader = CheckpointReader(folder / "checkpoint")
    return export_portable(spec, reader, folder / "onnx", precision=precision)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_rewritten_model_has_what_the_runner_binds(
    tmp_path: Path, preset: str, precision: str
) -> None:
    path = portable(tmp_path, preset, precision)
    build_cuda(path)
    model = onnx.load_model(path, load_external_data=False)
    pools = [value.name for value in model.graph.input if "_pool." in value.name]
    assert {value.name for value in model.graph.input} == {
        *("input_ids", "positions", "block_tables", "slot_mapping", "logit_rows"),
        *pools,
    }
    assert {value.name for value in model.graph.output} == {
        *("logits", "squared_norms", "best_logits", "best_ids", "best_totals"),
        *(name.replace("_pool.", "_pool_out.") for name in pools),
    }
    onnx.checker.check_model(str(path))
    for pool in pools:
        (writer,) = [n for n in model.graph.node if pool in n.input and n.op_type != "Shape"]
        readers = [n.op_type for n in model.graph.node if writer.output[0] in n.input]
        assert (writer.op_type, readers) == ("ScatterND", ["Gather"])


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("preset", PRESETS)
def test_weights_and_pools_keep_half_precision_and_logits_are_wide(
    tmp_path: Path, preset: str, precision: str
) -> None:
    path = portable(tmp_path, preset, precision)
    build_cuda(path)
    graph = onnx.load_model(path, load_external_data=False).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)}
    pools = {kind for name, kind in types.items() if "_pool" in name}
    assert (pools, types["logits"]) == ({HALF[precision]}, TensorProto.FLOAT)
    # A product with a weight is never widened: its weight is read as it is stored.
    stored = {tensor.name for tensor in graph.initializer if tensor.data_type == HALF[precision]}
    assert not [n.name for n in graph.node if n.op_type == "Cast" and n.input[0] in stored]


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_waits_while_a_decode_is_recorded(tmp_path: Path, preset: str) -> None:
    """A CPU node waits for every value of a GPU node, of Shape alone not; a CUDA graph may not."""
    path = portable(tmp_path, preset, "fp16")
    build_cuda(path)
    graph = onnx.load_model(path, load_external_data=False).graph
    assert not {"Size", "NonZero", "If", "Loop"} & {node.op_type for node in graph.node}


@pytest.mark.parametrize("preset", PRESETS)
def test_an_index_names_one_number(tmp_path: Path, preset: str) -> None:
    """One thread copies what an index names; a row of numbers would take 300 us."""
    path = portable(tmp_path, preset, "fp32")
    build_cuda(path)
    graph = onnx.shape_inference.infer_shapes(onnx.load_model(path)).graph
    shapes = {v.name: v.type.tensor_type.shape.dim for v in (*graph.value_info, *graph.input)}
    for node in (node for node in graph.node if node.op_type == "ScatterND"):
        # Ranks pool + index − 1 − updates give how many of the pool's dimensions an index has.
        ranks = [len(shapes.get(name, ())) for name in node.input]
        assert ranks == [3, 3, 2]


@pytest.mark.parametrize("preset", PRESETS)
def test_no_kernel_needs_cudnn(tmp_path: Path, preset: str) -> None:
    """But for ReduceMean inside a norm, which the runtime replaces with a kernel of its own."""
    path = portable(tmp_path, preset, "fp32")
    build_cuda(path)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.add_session_config_entry(
        "session.optimized_model_external_initializers_file_name", "optimized.bin"
    )
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    model = onnx.load_model(tmp_path / "optimized.onnx", load_external_data=False)
    assert not NEED_CUDNN & {node.op_type for node in model.graph.node}


def test_the_best_tokens_are_those_of_the_logits() -> None:
    shape = ("R", 40)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["logits"])],
        "best",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape)],
    )
    _give_best(graph)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("deepseek", 1)]
    functions = [cuda_functions()["BestTokens"]]
    model = helper.make_model(graph, functions=functions, opset_imports=imports, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).normal(0, 50, (3, 40)).astype(np.float32)
    x[2] = x[2] * 0 + 800  # exponentials would overflow
    values, ids, totals = session.run(["best_logits", "best_ids", "best_totals"], {"x": x})
    assert values.shape == ids.shape == (3, NUM_BEST)
    np.testing.assert_array_equal(values, -np.sort(-x, axis=1)[:, :NUM_BEST])
    np.testing.assert_array_equal(np.take_along_axis(x, ids, axis=1), values)
    wide = x.astype(np.float64)
    expected = np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(totals, expected, rtol=1e-5)


def test_the_release_that_make_installs_is_the_one_that_engines_are_built_for() -> None:
    makefile = (Path(__file__).parents[3] / "Makefile").read_text(encoding="utf-8")
    assert f"ONNXRUNTIME_GPU := onnxruntime-gpu=={ONNXRUNTIME_GPU}\n" in makefile


def int4_portable(folder: Path, precision: str, expert_size: int = 64) -> Path:
    config = preset_config("v2") | {"num_hidden_layers": 2, "moe_intermediate_size": expert_size}
    checkpoint, _ = write_int4_checkpoints(folder, config, AWQ_CONFIG, awq)
    spec = read_model_spec(checkpoint)
    reader = open_checkpoint(checkpoint, spec)
    return export_portable(spec, reader, folder / "onnx", precision=precision)


def test_int4_layers_keep_their_groups_and_have_no_accuracy_level(tmp_path: Path) -> None:
    path = int4_portable(tmp_path, "fp16")
    graph = onnx.load_model(path, load_external_data=False).graph
    calls = [n for n in graph.node if n.op_type in ("LinearInt4", "ExpertsInt4")]
    groups = {n.name: helper.get_node_attr_value(n, "group_size") for n in calls}
    build_cuda(path)
    graph = onnx.load_model(path, load_external_data=False).graph
    products = [n for n in graph.node if n.op_type in ("MatMulNBits", "QMoE")]
    assert {n.op_type for n in products} == {"MatMulNBits", "QMoE"}
    assert len(products) == len(groups)
    for node in products:
        settings = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        assert settings["block_size"] in groups.values()
        assert "accuracy_level" not in settings
        # Codes are as the file has them; without 0 the kernel takes them for arranged already.
        assert settings.get("weights_prepacked", 0) == 0
        assert (node.op_type == "QMoE") == ("weights_prepacked" in settings)
    scales = {n.input[2] for n in products if n.op_type == "MatMulNBits"}
    assert {t.data_type for t in graph.initializer if t.name in scales} == {TensorProto.FLOAT16}


def test_int4_experts_in_fp32_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = int4_portable(tmp_path, "fp32")
    with pytest.raises(BuildError, match="INT4 experts in fp32; build with PRECISION=fp16 or bf16"):
        build_cuda(path)


def test_int4_experts_whose_zero_points_end_within_a_byte_are_refused(tmp_path: Path) -> None:
    path = int4_portable(tmp_path, "fp16", expert_size=48)
    with pytest.raises(
        BuildError, match=r"an odd number of groups a row \(8 and 3\): .*SYMMETRIC=1"
    ):
        build_cuda(path)
