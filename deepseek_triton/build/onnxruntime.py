"""Target "onnxruntime": the portable model rewritten for ONNX Runtime on the CPU.

    portable                                   rewritten
    context_lens [B], last_token [B]           slot_mapping [T, 2], logit_rows [R]   (T = B · S)
    AttentionMask, LatentAttention             …InPlace: rows are scattered into the pool first
    new_kv.<l> [B, S, W]                       kv_pool_out.<l>, the same buffer as kv_pool.<l>
    Experts                                    ExpertsSparse: com.microsoft::MoE

Calls are inlined at the end; weights are not touched. The runner (runner/onnxruntime.py) describes the inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner
from onnx import helper

from deepseek_triton.build.ort_functions import (
    CONTRIB_DOMAIN,
    CONTRIB_VERSION,
    ort_functions,
)
from deepseek_triton.errors import BuildError
from deepseek_triton.export.functions import DOMAIN

INT64 = onnx.TensorProto.INT64
_LAST = "last"  # the portable node that picks one hidden row for each row of the batch
_REPLACED_INPUTS = ("context_lens", "last_token")


def build(model_path: Path) -> None:
    """Rewrite the portable model at `model_path` in place; its weights file stays as it is.

    Raises:
        BuildError: the model is not a portable one.
    """
    model = onnx.load_model(model_path, load_external_data=False)
    rewrite(model)
    # ONNX Runtime would inline the functions itself, but 1.23, the last for Python 3.10, checks
    # shapes before that and finds none.
    onnx.save_model(onnx.inliner.inline_local_functions(model), model_path)


def rewrite(model: onnx.ModelProto) -> None:
    """Turn the portable `model` into the in-place form; mutates it."""
    graph = model.graph
    missing = set(_REPLACED_INPUTS) - {value.name for value in graph.input}
    if missing:
        raise BuildError(f"not a portable model: it has no input {min(missing)!r}")
    _take_logit_rows(graph)
    for node in graph.node:
        if node.domain == DOMAIN and node.op_type in _REWRITES:
            _REWRITES[node.op_type](graph, node)
    _drop_unused(graph)
    inputs = [value for value in graph.input if value.name not in _REPLACED_INPUTS]
    inputs += [
        helper.make_tensor_value_info("slot_mapping", INT64, ("T", 2)),
        helper.make_tensor_value_info("logit_rows", INT64, ("R",)),
    ]
    _replace(graph.input, inputs)
    _replace_functions(model)
    model.opset_import.add(domain=CONTRIB_DOMAIN, version=CONTRIB_VERSION)


def _take_logit_rows(graph: onnx.GraphProto) -> None:
    """Pick hidden rows by logit_rows [R] rather than one in each row of the batch."""
    producers = {output: node for node in graph.node for output in node.output}
    last = producers[_LAST]
    hidden = producers[last.input[0]].input[0]
    last.CopyFrom(helper.make_node("Gather", [hidden, "logit_rows"], [_LAST], name=_LAST, axis=0))
    logits = next(value for value in graph.output if value.name == "logits")
    logits.type.tensor_type.shape.dim[0].dim_param = "R"


def _mask(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    positions, _, block_tables = node.input
    node.op_type = "AttentionMaskInPlace"
    _replace(node.input, [positions, block_tables])


def _attention(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    pool = next(name for name in node.input if name.startswith("kv_pool."))
    pool_out = pool.replace("kv_pool.", "kv_pool_out.")
    new_rows = node.output[1]
    node.op_type = "LatentAttentionInPlace"
    node.input.append("slot_mapping")
    node.output[1] = pool_out
    value = next(value for value in graph.output if value.name == new_rows)
    value.CopyFrom(next(value for value in graph.input if value.name == pool))
    value.name = pool_out


def _experts(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    (top_k,) = next(a.ints for a in node.attribute if a.name == "top_k")
    node.op_type = "ExpertsSparse"
    node.attribute.append(helper.make_attribute("k", top_k))


_REWRITES = {"AttentionMask": _mask, "LatentAttention": _attention, "Experts": _experts}


def _drop_unused(graph: onnx.GraphProto) -> None:
    """Remove nodes and initializers that no output needs."""
    needed = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    _replace(graph.node, reversed(kept))
    _replace(graph.initializer, [t for t in graph.initializer if t.name in needed])


def _replace_functions(model: onnx.ModelProto) -> None:
    """Keep the functions that are called, directly or through each other, ours before portable."""
    library = {f.name: f for f in model.functions} | dict(ort_functions())
    found: dict[str, onnx.FunctionProto] = {}
    pending = list(model.graph.node)
    while pending:
        node = pending.pop()
        if node.domain == DOMAIN and node.op_type not in found:
            found[node.op_type] = library[node.op_type]
            pending.extend(library[node.op_type].node)
    _replace(model.functions, [found[name] for name in sorted(found)])


def _replace(field: Any, values: Iterable[Any]) -> None:
    """Set a repeated protobuf field."""
    items = list(values)
    del field[:]
    field.extend(items)
