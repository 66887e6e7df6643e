from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from deepseek_triton.build.graph_passes import cancelling_pairs, merge_duplicates, simplify
from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.presets import PRESETS, preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.export.portable import export_portable

FLOAT, HALF, DOUBLE, INT64 = 1, 10, 11, 7
X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def model_of(text: str, **constants: NDArray[np.generic]) -> onnx.ModelProto:
    """A model of one input x [2, 3, A] and one output y, its nodes in ONNX's textual syntax."""
    graph = onnx.parser.parse_graph(f"main (float[2,3,A] x) => (float[B,C,D] y) {{{text}}}")
    for name, value in constants.items():
        graph.initializer.append(numpy_helper.from_array(value, name))
    for index, node in enumerate(graph.node):
        node.name = f"n{index}"
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def run(model: onnx.ModelProto) -> NDArray[np.float32]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result: NDArray[np.float32] = session.run(None, {"x": X})[0]
    return result


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


SHAPE = np.array([2, 12, 1])
CASES = {
    "transposes_that_cancel": (
        "a = Transpose <perm = [2, 0, 1]> (x) b = Transpose <perm = [1, 2, 0]> (a) y = Neg (b)",
        ["Neg"],
    ),
    "transposes_that_join": (
        "a = Transpose <perm = [1, 0, 2]> (x) b = Transpose <perm = [0, 2, 1]> (a) y = Neg (b)",
        ["Transpose", "Neg"],
    ),
    "a_transpose_that_others_read": (
        "a = Transpose <perm = [1, 0, 2]> (x) b = Transpose <perm = [1, 0, 2]> (a)"
        "c = ReduceSum (a) y = Mul (b, c)",
        ["Transpose", "ReduceSum", "Mul"],
    ),
    "reshapes": ("a = Reshape (x, flat) b = Reshape (a, shape) y = Neg (b)", ["Reshape", "Neg"]),
    "reshapes_back": (
        "a = Reshape (x, flat) s = Shape (x) b = Reshape (a, s) y = Neg (b)",
        ["Neg"],
    ),
    "a_reshape_that_copies_a_size": (
        "a = Reshape (x, shape) b = Reshape (a, copy) y = Neg (b)",
        ["Reshape", "Reshape", "Neg"],
    ),
    "a_computed_shape": (
        "a = Reshape (x, flat) s = Shape <start = 0, end = 1> (x) t = Concat <axis = 0> (s, rest)"
        "b = Reshape (a, t) y = Neg (b)",
        ["Shape", "Concat", "Reshape", "Neg"],
    ),
    "a_cast_to_the_same_type": ("a = Cast <to = 1> (x) y = Neg (a)", ["Neg"]),
    "a_cast_like_of_the_same_type": ("a = CastLike (x, x) y = Neg (a)", ["Neg"]),
    "a_cast_there_and_back": (
        "a = Cast <to = 11> (x) b = Cast <to = 1> (a) y = Neg (b)",
        ["Neg"],
    ),
    "a_cast_that_rounds": (
        "a = Cast <to = 10> (x) b = Cast <to = 1> (a) y = Neg (b)",
        ["Cast", "Cast", "Neg"],
    ),
    "a_cast_at_the_output": ("y = Cast <to = 1> (x)", ["Cast"]),
    "duplicates": (
        "p = Constant <value_float = 2.0> () q = Constant <value_float = 2.0> ()"
        "a = Mul (x, p) b = Mul (x, q) y = Add (a, b)",
        ["Constant", "Mul", "Add"],
    ),
    "constants_that_differ": (
        "p = Constant <value_float = 2.0> () q = Constant <value_float = 3.0> ()"
        "a = Mul (x, p) b = Mul (x, q) y = Add (a, b)",
        ["Constant", "Constant", "Mul", "Mul", "Add"],
    ),
    "dead_nodes": ("a = Exp (x) y = Neg (x)", ["Neg"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_pass_removes_what_does_nothing_and_keeps_the_numbers(name: str) -> None:
    text, left = CASES[name]
    constants = {"flat": np.array([-1]), "shape": SHAPE, "copy": np.array([0, 3, 4])}
    model = model_of(text, **constants, rest=np.array([-1, 1]))
    expected = run(model)
    simplify(model)
    assert ops(model) == left
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_array_equal(run(model), expected)
    assert cancelling_pairs(model) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (CASES["transposes_that_cancel"][0], ["n1"]),
        (CASES["transposes_that_join"][0], ["n1"]),
        (CASES["reshapes"][0], ["n1"]),
        (CASES["a_cast_there_and_back"][0], ["n1"]),
        (CASES["a_reshape_that_copies_a_size"][0], []),
    ],
)
def test_pairs_are_found_without_changing_the_model(text: str, found: list[str]) -> None:
    model = model_of(text, flat=np.array([-1]), shape=SHAPE, copy=np.array([0, 3, 4]))
    before = model.SerializeToString()
    assert cancelling_pairs(model) == found
    assert model.SerializeToString() == before


def test_equal_constants_are_one_and_weights_in_files_stay_apart() -> None:
    two = np.full(4, 2, np.float32)
    model = model_of("a = Mul (x, p) b = Mul (x, q) y = Add (a, b)", p=two, q=two.copy())
    merge_duplicates(model.graph)
    assert ops(model) == ["Mul", "Add"]
    model = model_of("a = Mul (x, p) b = Mul (x, q) y = Add (a, b)")
    for name, offset in (("p", "0"), ("q", "16")):
        tensor = model.graph.initializer.add(name=name, dims=[4], data_type=FLOAT)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="w")
        tensor.external_data.add(key="offset", value=offset)
    merge_duplicates(model.graph)
    assert ops(model) == ["Mul", "Mul", "Add"]


@pytest.fixture(scope="module", params=PRESETS)
def portable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("portable")
    write_random_checkpoint(folder / "checkpoint", preset_config(request.param))
    spec = read_model_spec(folder / "checkpoint")
    return export_portable(spec, CheckpointReader(folder / "checkpoint"), folder / "onnx")


def step_inputs(model: onnx.ModelProto) -> dict[str, NDArray[np.generic]]:
    """Two rows of three tokens, after 5 and 20 tokens in shuffled blocks."""
    rng = np.random.default_rng(0)
    pools = {}
    for value in model.graph.input:
        if "_pool." in value.name:
            sizes = [dim.dim_value or 5 for dim in value.type.tensor_type.shape.dim]
            pools[value.name] = rng.standard_normal(sizes).astype(np.float32)
    return pools | {
        "input_ids": rng.integers(3, 4000, (2, 3)).astype(np.int32),
        "positions": np.array([[5, 6, -1], [20, 21, 22]], np.int32),
        "context_lens": np.array([5, 20], np.int32),
        "block_tables": np.array([[3, 0], [4, 1]], np.int32),
        "last_token": np.array([1, 2], np.int32),
    }


def test_no_transpose_or_reshape_of_the_exporter_undoes_another(portable: Path) -> None:
    """Checked on values: no two nodes on a chain of them give back what was there before.

    One alone may: queries are grouped by KV head even where each has a KV head of its own.
    """
    model = onnx.inliner.inline_local_functions(onnx.load_model(portable))
    simplify(model)
    assert cancelling_pairs(model) == []
    moving = {"Transpose", "Reshape", "Squeeze", "Unsqueeze"}
    earlier: dict[str, list[str]] = {}
    for node in model.graph.node:
        if node.op_type in moving:
            source = node.input[0]
            earlier[node.output[0]] = [source, *earlier.get(source, [])]
    chains = {end: values for end, values in earlier.items() if len(values) > 1}
    assert chains, "there is nothing to check"
    values = {name for end, chain in chains.items() for name in (end, *chain)}
    outputs = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in values - outputs)
    inputs = step_inputs(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    found = dict(zip(names, session.run(None, inputs), strict=True)) | inputs
    for end, chain in chains.items():
        for name in chain[1:]:
            same = np.array_equal(found[name], found[end])
            assert not same, f"{end} is {name} again"


def test_passes_keep_the_bits_of_a_whole_model(portable: Path) -> None:
    model = onnx.inliner.inline_local_functions(onnx.load_model(portable))
    inputs = step_inputs(model)
    results = []
    for step in (lambda: None, lambda: simplify(model)):
        step()
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        results.append(session.run(None, inputs))
    for before, after in zip(*results, strict=True):
        np.testing.assert_array_equal(before, after)
