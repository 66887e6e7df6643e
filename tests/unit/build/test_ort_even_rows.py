from __future__ import annotations

import onnx
import pytest
from onnx import helper

from deepseek_triton.build.ort_even_rows import pad_odd_rows
from deepseek_triton.export.functions import DOMAIN


def product(x: str, y: str, *, bits: int = 4, group: int = 128) -> onnx.NodeProto:
    sizes = {"K": 256, "N": 256, "bits": bits, "block_size": group}
    inputs = [x, f"{y}.codes", f"{y}.scales"]
    return helper.make_node("MatMulNBits", inputs, [y], domain="com.microsoft", **sizes)


def padded(*nodes: onnx.NodeProto) -> dict[str, onnx.NodeProto]:
    """Return the nodes by output after the pass; they are in the order of a graph."""
    graph = helper.make_graph(list(nodes), "g", [], [])
    pad_odd_rows(graph)
    known = {"input_ids", "x"}
    for node in graph.node:
        assert {name for name in node.input if not name.endswith(("codes", "scales"))} <= known
        known.update(node.output)
    return {name: node for node in graph.node for name in node.output}


@pytest.mark.parametrize("group", [32, 64])
def test_products_of_eight_bits_need_no_second_row(group: int) -> None:
    nodes = padded(product("x", "y", bits=8, group=group))
    assert list(nodes) == ["y"] and nodes["y"].input[0] == "x"


@pytest.mark.parametrize("group", [16, 32, 128])
def test_products_of_four_bits_do_whatever_their_group(group: int) -> None:
    assert padded(product("x", "y", group=group))["y"].op_type == "Slice"


def test_an_input_is_padded_once_and_outputs_keep_their_names() -> None:
    nodes = padded(product("x", "y"), product("x", "z", group=64))
    assert [node.op_type for node in nodes.values()].count("Pad") == 1
    assert nodes["y.even"].input[0] == nodes["z.even"].input[0] == "x.even"
    assert nodes["y"].op_type == nodes["z"].op_type == "Slice"


def test_the_additional_row_stays_through_a_swiglu() -> None:
    swiglu = helper.make_node("SwiGLU", ["gate_up"], ["active"], domain=DOMAIN)
    nodes = padded(product("x", "gate_up"), swiglu, product("active", "down"))
    assert [node.op_type for node in nodes.values()].count("Pad") == 1
    assert nodes["active.even"].input[0] == "gate_up.even"
    assert nodes["down.even"].input[0] == "active.even"
