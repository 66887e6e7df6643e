"""An even number of rows for products whose kernel treats a row that is left over in another way.

ONNX Runtime's INT4 kernels at accuracy level 4 take two rows at a time. A row that is left over
gets other last bits: with AVX-512 the odd one of groups larger than 32, with AVX2 a lone one of
any. So its numbers would depend on its company. A row of zeros is put behind an odd number of
tokens, and taken off again. Experts have rows of their own,
and see to this themselves (ort_functions.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import helper

from deepseek_triton.build.graph_passes import replace
from deepseek_triton.export.functions import DOMAIN

_EVEN = ["even_rows.padding", "even_rows.begin", "even_rows.tokens"]


def pad_odd_rows(graph: onnx.GraphProto) -> None:
    """Pad the inputs [T, K] of a graph's 4-bit products; mutates it.

    A SwiGLU between two products keeps the additional row.
    """
    if not any(_needs_even_rows(node) for node in graph.node):
        return
    padded: dict[str, str] = {}  # values that have the additional row already
    nodes = [
        helper.make_node("EvenRows", ["input_ids"], _EVEN, name="even_rows", domain=DOMAIN),
        *(new for node in graph.node for new in _padded(node, padded)),
    ]
    replace(graph.node, nodes)


def _needs_even_rows(node: onnx.NodeProto) -> bool:
    return node.op_type == "MatMulNBits" and helper.get_node_attr_value(node, "bits") == 4


def _padded(node: onnx.NodeProto, padded: dict[str, str]) -> Iterator[onnx.NodeProto]:
    """Yield `node`, or it on padded rows with what pads and cuts them."""
    x, y = (list(names)[0] if names else "" for names in (node.input, node.output))
    product = _needs_even_rows(node)
    if not product and not (node.op_type == "SwiGLU" and x in padded):
        yield node
        return
    padding, begin, tokens = _EVEN
    if x not in padded:
        padded[x] = f"{x}.even"
        yield helper.make_node("Pad", [x, padding], [padded[x]], name=padded[x])
    padded[y] = f"{y}.even"
    node.input[0], node.output[0] = padded[x], padded[y]
    yield node
    yield helper.make_node("Slice", [padded[y], begin, tokens], [y], name=f"{y}.own")
