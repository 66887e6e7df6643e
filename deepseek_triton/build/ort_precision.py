"""Half-precision models for ONNX Runtime's CPU kernels, which multiply in float32 alone.

Weights stay narrow in the file and on the way from disk; each is widened by a Cast, which ONNX
Runtime folds while it loads the model, so that no step pays for it. Everything else is float32:
hidden states, KV rows, logits. Left in the graph, the Casts cost three times the product itself.
"""

from __future__ import annotations

import onnx
from onnx import helper

FLOAT = onnx.TensorProto.FLOAT
_NARROW = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def widen(graph: onnx.GraphProto) -> None:
    """Make every value of `graph` that is half precision float32; initializers keep their type.

    Mutates `graph`. A model in float32 stays as it is.
    """
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in _NARROW:
            value.type.tensor_type.elem_type = FLOAT
    casts = []
    for tensor in graph.initializer:
        if tensor.data_type in _NARROW:
            stored = f"{tensor.name}.stored"
            casts.append(helper.make_node("Cast", [stored], [tensor.name], name=stored, to=FLOAT))
            tensor.name = stored
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
