"""Target "onnxruntime": the portable model rewritten for ONNX Runtime on the CPU.

    portable                                   rewritten
    context_lens [B], last_token [B]           slot_mapping [T, 2], logit_rows [R]   (T = B · S)
    AttentionMask, LatentAttention,            …InPlace: rows are scattered into the pool first
      GroupedQueryAttention
    new_<p>.<l> [B, S, W]                      <p>_pool_out.<l>, the same buffer as <p>_pool.<l>
    w_uk, w_uv [H, …]                          H weights each, the same bytes of the weights file
    Experts                                    ExpertsSparse: com.microsoft::MoE
    LinearInt4, ExpertsInt4                    MatMulNBits, QMoE (ort_int4.py)
    half-precision weights                     Cast to float32, as is all else (ort_precision.py)

Calls are inlined at the end; weights stay where they are in their file, but for some of INT4. The
runner (runner/onnxruntime.py) describes the inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx import helper, numpy_helper

from deepseek_triton.build.graph_passes import simplify
from deepseek_triton.build.ort_functions import (
    CONTRIB_DOMAIN,
    CONTRIB_VERSION,
    ort_functions,
)
from deepseek_triton.build.ort_int4 import ACCURACY_LEVELS, Int4Rewriter
from deepseek_triton.build.ort_precision import widen
from deepseek_triton.errors import BuildError
from deepseek_triton.export.functions import DOMAIN
from deepseek_triton.export.portable import DRAFT_FILE

INT64 = onnx.TensorProto.INT64
_LAST = "last"  # the portable node that picks one hidden row for each row of the batch
_REPLACED_INPUTS = ("context_lens", "last_token")
# Naming every expert has all of them read from memory, which tokens from this many times the rows
# it takes do by themselves.
_REPEAT_BELOW = 4


def build(model_path: Path, int4_accuracy_level: int = ACCURACY_LEVELS[0]) -> None:
    """Rewrite the portable model at `model_path`, and its draft if there is one, in place.

    Raises:
        BuildError: the model is not a portable one.
    """
    int4 = Int4Rewriter(model_path.parent, int4_accuracy_level)
    finished = []
    for path in (model_path, model_path.with_name(DRAFT_FILE)):
        if not path.is_file():
            continue
        model = onnx.load_model(path, load_external_data=False)
        quantized = int4.rewrite(model.graph)
        rewrite(model)
        # ONNX Runtime would inline the functions itself, but 1.23, the last for Python 3.10, checks
        # shapes before that and finds none.
        inlined = onnx.inliner.inline_local_functions(model)
        simplify(inlined)
        if quantized:
            int4.narrow_heads(inlined.graph)
        onnx.save_model(inlined, path)
        finished.append(inlined)
    int4.trim(model.graph for model in finished)


def rewrite(model: onnx.ModelProto) -> None:
    """Turn the portable `model` into the in-place form; mutates it."""
    graph = model.graph
    missing = set(_REPLACED_INPUTS) - {value.name for value in graph.input}
    if missing:
        raise BuildError(f"not a portable model: it has no input {min(missing)!r}")
    _take_logit_rows(graph)
    num_heads = max(_size(n, "num_heads") for n in graph.node if n.op_type in _ATTENTION)
    for node in list(graph.node):
        if node.domain == DOMAIN and node.op_type in _REWRITES:
            _REWRITES[node.op_type](graph, node)
    _drop_unused(graph)
    inputs = [value for value in graph.input if value.name not in _REPLACED_INPUTS]
    inputs += [
        helper.make_tensor_value_info("slot_mapping", INT64, ("T", 2)),
        helper.make_tensor_value_info("logit_rows", INT64, ("R",)),
    ]
    _replace(graph.input, inputs)
    _replace_functions(model, num_heads)
    model.opset_import.add(domain=CONTRIB_DOMAIN, version=CONTRIB_VERSION)
    widen(graph)


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


def _latent_attention(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    q, kv_a, kv_norm, w_uk, w_uv, cos, sin, turn, pool, block_tables, mask = node.input
    by_head = [*_split_by_head(graph, w_uk), *_split_by_head(graph, w_uv)]
    step = (cos, sin, turn, pool, block_tables, mask, "slot_mapping")
    node.op_type = "LatentAttentionInPlace"
    _replace(node.input, [q, kv_a, kv_norm, *by_head, *step])
    _return_pool(graph, node, 1, pool)


def _grouped_query_attention(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    node.op_type = "GroupedQueryAttentionInPlace"
    node.input.append("slot_mapping")
    for index, pool in enumerate(node.input[6:8], start=1):
        _return_pool(graph, node, index, pool)


def _return_pool(graph: onnx.GraphProto, node: onnx.NodeProto, index: int, pool: str) -> None:
    """Make output `index` of `node`, new rows so far, the whole `pool` after the step."""
    new_rows, pool_out = node.output[index], pool.replace("_pool.", "_pool_out.")
    node.output[index] = pool_out
    value = next(value for value in graph.output if value.name == new_rows)
    value.CopyFrom(next(value for value in graph.input if value.name == pool))
    value.name = pool_out


def _split_by_head(graph: onnx.GraphProto, name: str) -> list[str]:
    """Add one initializer for each head of the initializer `name` [H, K, N]; return their names."""
    stacked = next(tensor for tensor in graph.initializer if tensor.name == name)
    heads, *shape = stacked.dims
    names = [f"{name}.{head}" for head in range(heads)]
    if stacked.data_location != onnx.TensorProto.EXTERNAL:
        for array, head_name in zip(numpy_helper.to_array(stacked), names, strict=True):
            graph.initializer.append(numpy_helper.from_array(array, head_name))
        return names
    entries = {entry.key: entry.value for entry in stacked.external_data}
    length = int(entries["length"]) // heads
    for head, head_name in enumerate(names):
        tensor = graph.initializer.add()
        tensor.CopyFrom(stacked)
        tensor.name = head_name
        _replace(tensor.dims, shape)
        offset = int(entries["offset"]) + head * length
        place = {**entries, "offset": str(offset), "length": str(length)}
        _replace(
            tensor.external_data,
            [onnx.StringStringEntryProto(key=k, value=v) for k, v in place.items()],
        )
    return names


def _experts(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    top_k = _size(node, "top_k")
    node.op_type = "ExpertsSparse"
    node.attribute.append(helper.make_attribute("k", top_k))
    node.input.extend(_extra_rows(graph, _size(node, "num_experts"), top_k))


def _extra_rows(graph: onnx.GraphProto, num_experts: int, top_k: int) -> list[str]:
    """Add the node that all layers' experts share, if it is not there; return its outputs."""
    outputs = [f"experts.{name}" for name in ("tokens", "count", "repeat", "covering")]
    if graph.node[0].op_type != "ExtraRows":
        rows = -(-num_experts // top_k)
        chosen = np.arange(rows * top_k).reshape(rows, top_k) % num_experts
        cover = np.full((rows, num_experts), -1e30, np.float32)
        np.put_along_axis(cover, chosen, 0.0, axis=1)
        graph.initializer.append(numpy_helper.from_array(cover, "experts.cover"))
        node = helper.make_node(
            "ExtraRows",
            ["input_ids", "experts.cover"],
            outputs,
            name="experts.extra_rows",
            domain=DOMAIN,
            few=_REPEAT_BELOW * rows,
        )
        graph.node.insert(0, node)
    return outputs


_ATTENTION = {
    "LatentAttention": _latent_attention,
    "GroupedQueryAttention": _grouped_query_attention,
}
_REWRITES = {"AttentionMask": _mask, **_ATTENTION, "Experts": _experts}


def _size(node: onnx.NodeProto, name: str) -> int:
    """Return the size that the portable model keeps as a list of one element."""
    (size,) = next(attribute.ints for attribute in node.attribute if attribute.name == name)
    return int(size)


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


def _replace_functions(model: onnx.ModelProto, num_heads: int) -> None:
    """Keep the functions that are called, directly or through each other, ours before portable."""
    library = {f.name: f for f in model.functions} | dict(ort_functions(num_heads))
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
