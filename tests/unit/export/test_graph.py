from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.checker

from deepseek_triton.export.graph import GraphBuilder
from deepseek_triton.export.precision import PRECISIONS, Precision

FP32 = PRECISIONS["fp32"]


def small_graph(hidden: int) -> GraphBuilder:
    graph = GraphBuilder(FP32)
    x = graph.input("x", onnx.TensorProto.FLOAT, ("T", hidden))
    weight = graph.weight("w", (2, hidden), [np.ones((2, hidden), np.float32)])
    graph.output(graph.node("deepseek.Linear", [x, weight], "y"), FP32.onnx_type, ("T", 2))
    return graph


def test_small_constants_stay_in_the_model_and_large_ones_go_to_the_file() -> None:
    small = small_graph(8).model("m", "weights.bin").graph.initializer[0]
    large = small_graph(800).model("m", "weights.bin").graph.initializer[0]
    assert small.data_location == onnx.TensorProto.DEFAULT
    assert large.data_location == onnx.TensorProto.EXTERNAL
    assert {e.key: e.value for e in large.external_data} == {
        "location": "weights.bin",
        "offset": "0",
        "length": "6400",
    }


def test_only_functions_that_are_called_are_in_the_model() -> None:
    model = small_graph(8).model("m", "weights.bin")
    assert [function.name for function in model.functions] == ["Linear"]
    onnx.checker.check_model(model, full_check=True)


def test_a_node_gives_its_name_to_its_value() -> None:
    node = small_graph(8).model("m", "weights.bin").graph.node[0]
    assert (node.name, list(node.output), node.domain) == ("y", ["y"], "deepseek")


def test_casts_to_float32_appear_only_where_the_model_is_narrower() -> None:
    assert GraphBuilder(FP32).float32("x", "cast") == "x"
    half = GraphBuilder(Precision("fp16", np.float16, onnx.TensorProto.FLOAT16))
    assert half.float32("x", "cast") == "cast"


def test_float32_weights_keep_their_type_in_a_narrower_model(tmp_path: Path) -> None:
    graph = GraphBuilder(Precision("fp16", np.float16, onnx.TensorProto.FLOAT16))
    graph.weight("narrow", (4,), [np.ones(4, np.float32)])
    graph.weight("wide", (4,), [np.ones(4, np.float32)], float32=True)
    narrow, wide = graph.model("m", "weights.bin").graph.initializer
    assert narrow.data_type == onnx.TensorProto.FLOAT16
    assert wide.data_type == onnx.TensorProto.FLOAT
