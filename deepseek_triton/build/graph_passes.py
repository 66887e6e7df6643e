"""Passes over a model whose calls are inlined: the nodes that inlining leaves behind are removed.

Each pass keeps every number that the model computes, so a target may run them before it compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

# Casts to a type on the right keep every value of the type on the left.
_WIDENED = {
    onnx.TensorProto.FLOAT16: (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE),
    onnx.TensorProto.BFLOAT16: (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE),
    onnx.TensorProto.FLOAT: (onnx.TensorProto.DOUBLE,),
    onnx.TensorProto.INT32: (onnx.TensorProto.INT64,),
}


def simplify(model: onnx.ModelProto) -> None:
    """Run all passes on `model`, which calls no local function; mutates it."""
    merge_duplicates(model.graph)
    types = _element_types(model)
    for rule in (_fix_type, _skip_cast, _skip_transpose, _skip_reshape):
        _rewrite(model.graph, types, rule)
    merge_duplicates(model.graph)
    drop_unused(model.graph)


def drop_unused(graph: onnx.GraphProto) -> None:
    """Remove nodes and initializers that no output needs."""
    needed = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    replace(graph.node, reversed(kept))
    replace(graph.initializer, [t for t in graph.initializer if t.name in needed])


def merge_duplicates(graph: onnx.GraphProto) -> None:
    """Keep one of each set of nodes that compute the same thing, and of equal small constants.

    Weights in an external file are told apart by their names alone.
    """
    outputs = {value.name for value in graph.output}
    same: dict[str, str] = {}
    found: dict[object, list[str]] = {}
    for tensor in graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            array = numpy_helper.to_array(tensor)
            constant = (tensor.data_type, tuple(tensor.dims), array.tobytes())
            same[tensor.name] = found.setdefault(constant, [tensor.name])[0]
    kept = []
    for node in graph.node:
        _rename_inputs(node, same)
        attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
        key = (node.domain, node.op_type, tuple(node.input), tuple(attributes), len(node.output))
        first = found.setdefault(key, list(node.output))
        if first != list(node.output) and outputs.isdisjoint(node.output):
            same.update(zip(node.output, first, strict=True))
        else:
            kept.append(node)
    replace(graph.node, kept)


def cancelling_pairs(model: onnx.ModelProto) -> list[str]:
    """Return the names of Transpose, Reshape and Cast nodes that a pass could still remove."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    types = _element_types(copy)
    found: list[str] = []
    for rule in (_skip_cast, _skip_transpose, _skip_reshape):
        found += _rewrite(copy.graph, types, rule)
    return found


def replace(field: Any, values: Iterable[Any]) -> None:
    """Set a repeated protobuf field."""
    items = list(values)
    del field[:]
    field.extend(items)


class _Graph:
    """What a rule looks up: producers, constants and element types of values."""

    def __init__(self, graph: onnx.GraphProto, types: dict[str, int]) -> None:
        self.types = types
        self._producers = {output: node for node in graph.node for output in node.output}
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}

    def producer(self, value: str, op_type: str) -> onnx.NodeProto | None:
        """Return the node that makes `value` if it is a standard `op_type`."""
        node = self._producers.get(value)
        return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None

    def constant(self, value: str) -> np.ndarray[Any, Any] | None:
        """Return a small constant, from an initializer or a Constant node; None for others."""
        tensor = self._tensors.get(value)
        if tensor is not None:
            external = tensor.data_location == onnx.TensorProto.EXTERNAL
            return None if external else numpy_helper.to_array(tensor)
        node = self.producer(value, "Constant")
        if node is None:
            return None
        (attribute,) = node.attribute
        content = helper.get_attribute_value(attribute)
        is_tensor = isinstance(content, onnx.TensorProto)
        return numpy_helper.to_array(content) if is_tensor else np.array(content)


_Rule = Callable[[_Graph, onnx.NodeProto], "str | None"]


def _rewrite(graph: onnx.GraphProto, types: dict[str, int], rule: _Rule) -> list[str]:
    """Apply `rule` to each node in order; it may edit the node or name a value to use instead.

    Returns the names of the nodes that changed. A node that makes a graph output stays.
    """
    view, outputs = _Graph(graph, types), {value.name for value in graph.output}
    same: dict[str, str] = {}
    kept, changed = [], []
    for node in graph.node:
        _rename_inputs(node, same)
        inputs = list(node.input)
        instead = None if outputs.intersection(node.output) else rule(view, node)
        if instead is None:
            kept.append(node)
        else:
            same[node.output[0]] = instead
        if instead is not None or inputs != list(node.input):
            changed.append(node.name or node.output[0])
    replace(graph.node, kept)
    return changed


def _fix_type(view: _Graph, node: onnx.NodeProto) -> None:
    """Turn CastLike into a Cast to the type that its second input has."""
    if node.op_type == "CastLike" and node.input[1] in view.types:
        to = view.types[node.input[1]]
        node.op_type = "Cast"
        replace(node.attribute, [helper.make_attribute("to", to)])
        del node.input[1:]


def _skip_cast(view: _Graph, node: onnx.NodeProto) -> str | None:
    """A Cast to the type that its input has, or back from a wider type, does nothing."""
    if node.op_type != "Cast":
        return None
    to, source = _attribute(node, "to"), node.input[0]
    if view.types.get(source) == to:
        return str(source)
    inner = view.producer(source, "Cast")
    if inner is None or view.types.get(inner.input[0]) != to:
        return None
    return str(inner.input[0]) if view.types.get(source) in _WIDENED.get(to, ()) else None


def _skip_transpose(view: _Graph, node: onnx.NodeProto) -> str | None:
    """Two Transposes are one, and the identity is none."""
    if node.op_type != "Transpose" or (perm := _attribute(node, "perm")) is None:
        return None
    inner = view.producer(node.input[0], "Transpose")
    if inner is not None and (first := _attribute(inner, "perm")) is not None:
        perm = [first[axis] for axis in perm]
        node.input[0] = inner.input[0]
        replace(node.attribute, [helper.make_attribute("perm", perm)])
    return str(node.input[0]) if list(perm) == sorted(perm) else None


def _skip_reshape(view: _Graph, node: onnx.NodeProto) -> str | None:
    """A Reshape that does not read the shape of a Reshape before it replaces that one.

    It does nothing at all when it goes back to the shape that the value had.
    """
    if node.op_type != "Reshape" or _attribute(node, "allowzero"):
        return None
    inner = view.producer(node.input[0], "Reshape")
    if inner is not None and all(size != 0 for size in _sizes(view, node.input[1])):
        node.input[0] = inner.input[0]
    shape = view.producer(node.input[1], "Shape")
    whole = shape is not None and not {"start", "end"} & {a.name for a in shape.attribute}
    if shape is not None and whole and shape.input[0] == node.input[0]:
        return str(node.input[0])
    return None


def _sizes(view: _Graph, value: str) -> Iterator[int | None]:
    """Yield the elements of the shape `value`; 0 copies a size, None is one known at run time.

    A size that is computed (by Shape) is never 0: steps are not empty.
    """
    constant = view.constant(value)
    if constant is not None:
        yield from (int(size) for size in constant.reshape(-1))
    elif joined := view.producer(value, "Concat"):
        for part in joined.input:
            yield from _sizes(view, part)
    else:
        yield None


def _element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Return the element type of every value that the standard operators determine."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    values = [*graph.value_info, *graph.input, *graph.output]
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return {name: kind for name, kind in types.items() if kind != onnx.TensorProto.UNDEFINED}


def _attribute(node: onnx.NodeProto, name: str) -> Any:
    """Return the value of an attribute, None when it is absent."""
    found = (a for a in node.attribute if a.name == name)
    return next((helper.get_attribute_value(a) for a in found), None)


def _rename_inputs(node: onnx.NodeProto, same: dict[str, str]) -> None:
    for index, name in enumerate(node.input):
        if name in same:
            node.input[index] = same[name]
