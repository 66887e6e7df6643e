"""The portable model rewritten for TensorRT: standard operators, explicit types, INT4 it can keep.

    portable                         rewritten
    Experts, ExpertsInt4             two products over all experts at once, ExpertsHidden between
    LinearInt4                       LinearInt4Signed, or …Shifted when blocks have zero points
    codes UINT4                      INT4, the same bits but the sign
    experts' down [E, D, F]          [D, E·F]
    logits                           float32, which the sampler reads

The graph stays pure: it reads the KV pools through the block table and returns the new rows, since
a TensorRT graph that returned a pool would copy it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx.inliner
from onnx import helper

from deepseek_triton.build.graph_passes import drop_unused, replace, simplify
from deepseek_triton.build.trt_functions import trt_functions
from deepseek_triton.build.trt_weights import WeightEditor
from deepseek_triton.errors import BuildError
from deepseek_triton.export.functions import DOMAIN

FLOAT = onnx.TensorProto.FLOAT


def build(model_path: Path) -> None:
    """Rewrite the portable model at `model_path` in place, and its weights file.

    Raises:
        BuildError: the model is not a portable one, or INT4 blocks do not fit.
    """
    model = onnx.load_model(model_path, load_external_data=False)
    rewrite(model, model_path.parent)
    onnx.save_model(inlined(model), model_path)


def rewrite(model: onnx.ModelProto, folder: Path) -> None:
    """Replace the calls that TensorRT needs in another form; mutates `model`, weights in `folder`.

    `model` still has calls, of functions that it holds.
    """
    graph = model.graph
    if not any(node.domain == DOMAIN for node in graph.node):
        raise BuildError(f"not a portable model: it calls no function of the domain {DOMAIN!r}")
    weights = WeightEditor(graph, folder)
    try:
        nodes = []
        for node in graph.node:
            nodes += _replacement(weights, node)
        replace(graph.node, nodes)
    finally:
        weights.close()
    _widen_logits(graph)
    drop_unused(graph)
    library = {function.name: function for function in model.functions} | trt_functions()
    replace(model.functions, library.values())


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return `model` without calls, simplified; each node is named after the call it was part of.

    A node `layers.3.attention/cached_scores__7` comes from the body of `layers.3.attention`.
    """
    callers = {output: node.name for node in model.graph.node for output in node.output}
    flat = onnx.inliner.inline_local_functions(model)
    caller = ""
    for node in reversed(flat.graph.node):  # a body ends with an output of its call
        caller = next((callers[name] for name in node.output if name in callers), caller)
        if not node.name:
            node.name = f"{caller}/{node.output[0]}"
    simplify(flat)
    return flat


def _replacement(weights: WeightEditor, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    if node.domain != DOMAIN:
        return [node]
    if node.op_type == "LinearInt4":
        x, *stored = node.input
        inputs = [x, *_int4_tensors(weights, node, *stored)]
        return [_linear_int4(weights, node, inputs, node.name, node.output[0])]
    if node.op_type in ("Experts", "ExpertsInt4"):
        return _experts(weights, node)
    return [node]


def _experts(weights: WeightEditor, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    x, expert_ids, expert_weights, *tensors = node.input
    name, quantized = node.name, node.op_type == "ExpertsInt4"
    half = len(tensors) // 2  # one tensor each, or codes, scales and zero points
    first, second = tensors[:half], tensors[half:]
    if quantized:
        block_size, columns = _attribute(node, "group_size"), weights.shape(second[0])[2]
        if columns % block_size:  # blocks must not span experts
            raise BuildError(_misfit(name, second[0], columns, block_size))
        first, second = (_int4_tensors(weights, node, *names) for names in (first, second))
    for tensor in first:
        experts, rows, columns = weights.shape(tensor)
        weights.reshape(tensor, (experts * rows, columns))
    for tensor in second:
        weights.swap_first_axes(tensor)
    both, hidden = f"{name}.both", f"{name}.hidden"
    middle = helper.make_node(
        "ExpertsHidden",
        [both, expert_ids, expert_weights],
        [hidden],
        name=hidden,
        domain=DOMAIN,
        num_experts=[_attribute(node, "num_experts")],
    )
    if not quantized:
        return [
            _call("Linear", [x, *first], both, both),
            middle,
            _call("Linear", [hidden, *second], name, node.output[0]),
        ]
    return [
        _linear_int4(weights, node, [x, *first], both, both),
        middle,
        _linear_int4(weights, node, [hidden, *second], name, node.output[0]),
    ]


def _int4_tensors(
    weights: WeightEditor, node: onnx.NodeProto, codes: str, scales: str, zero_points: str
) -> list[str]:
    """Return what a product with INT4 weights reads: signed codes, scales and any shifts."""
    weights.make_signed(codes)
    if _attribute(node, "symmetric"):
        return [codes, scales]
    return [codes, scales, weights.add_shifts(f"{codes}.shifts", scales, zero_points)]


def _linear_int4(
    weights: WeightEditor, node: onnx.NodeProto, inputs: list[str], name: str, output: str
) -> onnx.NodeProto:
    """Return the product of x with INT4 weights; inputs are x and then _int4_tensors."""
    codes = inputs[1]
    block_size, columns = _attribute(node, "group_size"), weights.shape(codes)[1]
    if columns % block_size:
        raise BuildError(_misfit(name, codes, columns, block_size))
    if len(inputs) == 3:
        return _call("LinearInt4Signed", inputs, name, output, block_size=block_size)
    blocks = [columns // block_size]
    return _call("LinearInt4Shifted", inputs, name, output, block_size=block_size, blocks=blocks)


def _call(op: str, inputs: list[str], name: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], name=name, domain=DOMAIN, **attributes)


def _misfit(name: str, tensor: str, columns: int, block_size: int) -> str:
    return (
        f"{name}: {tensor} has {columns} columns, which blocks of {block_size} do not fill, as "
        "TensorRT needs; quantise with another group size, or use TARGET=onnxruntime"
    )


def _attribute(node: onnx.NodeProto, name: str) -> int:
    """Return an integer attribute, which the portable model may keep as a list of one element."""
    attribute = next(a for a in node.attribute if a.name == name)
    value = helper.get_attribute_value(attribute)
    return int(value[0] if isinstance(value, list) else value)


def _widen_logits(graph: onnx.GraphProto) -> None:
    logits = next((value for value in graph.output if value.name == "logits"), None)
    if logits is None:
        raise BuildError("not a portable model: it has no output 'logits'")
    if logits.type.tensor_type.elem_type != FLOAT:
        producer = next(node for node in graph.node if "logits" in node.output)
        producer.output[0] = "logits.narrow"
        graph.node.append(
            helper.make_node("Cast", ["logits.narrow"], ["logits"], name="logits.float", to=FLOAT)
        )
        logits.type.tensor_type.elem_type = FLOAT
