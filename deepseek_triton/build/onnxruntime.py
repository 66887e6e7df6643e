"""Target "onnxruntime": the portable model rewritten for ONNX Runtime, on the CPU or on CUDA.

    portable                                   rewritten
    context_lens [B], last_token [B]           slot_mapping [T, 2], logit_rows [R]   (T = B · S)
    AttentionMask, LatentAttention,            …InPlace: rows are scattered into the pool first
      GroupedQueryAttention
    new_<p>.<l> [B, S, W]                      <p>_pool_out.<l>, the same buffer as <p>_pool.<l>
    Experts                                    ExpertsSparse: com.microsoft::MoE
    LinearInt4, ExpertsInt4                    MatMulNBits, QMoE (ort_int4.py)

    on the CPU
    w_uk, w_uv [H, …]                          H weights each, the same bytes of the weights file
    half-precision weights                     Cast to float32, as is all else (ort_precision.py)

    on CUDA
    slot_mapping                               [T + Z, 2]: the last Z slots are cleared
    half-precision weights                     as they are, and all but logits and softmax with them
    logits                                     Cast to float32, with the best of them beside

Calls are inlined at the end; weights stay where they are in their file, but for some of INT4. The
runner (runner/onnxruntime.py) describes the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
    cpu_functions,
    cuda_functions,
)
from deepseek_triton.build.ort_int4 import ACCURACY_LEVELS, Int4Rewriter
from deepseek_triton.build.ort_precision import widen
from deepseek_triton.errors import BuildError
from deepseek_triton.export.functions import DOMAIN
from deepseek_triton.export.portable import DRAFT_FILE

INT64, FLOAT = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
_LAST = "last"  # the portable node that picks one hidden row for each row of the batch
_REPLACED_INPUTS = ("context_lens", "last_token")
# Naming every expert has all of them read from memory, which tokens from this many times the rows
# it takes do by themselves.
_REPEAT_BELOW = 4
NUM_BEST = 8
"""Tokens of a row that CUDA gives apart. The runner takes the lowest id of those that tie for the
first place, and hardly ever are there more."""


@dataclass(frozen=True)
class Form:
    """What a provider's kernels want."""

    calls: Mapping[str, Callable[[onnx.GraphProto, onnx.NodeProto], None]]  # by portable operator
    functions: Callable[[int], Mapping[str, onnx.FunctionProto]]  # given the number of heads
    finish: Callable[[onnx.GraphProto], None]  # mutates the rewritten graph


def build(model_path: Path, int4_accuracy_level: int = ACCURACY_LEVELS[0]) -> None:
    """Rewrite the portable model at `model_path`, and its draft if there is one, for the CPU.

    Mutates the folder. Raises:
        BuildError: the model is not a portable one.
    """
    _build(model_path, CPU, int4_accuracy_level)


def build_cuda(model_path: Path) -> None:
    """Rewrite the portable model at `model_path` for CUDA; mutates its folder.

    Raises:
        BuildError: the model is not a portable one, or has INT4 experts and computes in float32.
    """
    _build(model_path, CUDA, None)


def _build(model_path: Path, form: Form, int4_accuracy_level: int | None) -> None:
    int4 = Int4Rewriter(model_path.parent, int4_accuracy_level)
    finished = []
    for path in (model_path, model_path.with_name(DRAFT_FILE)):
        if not path.is_file():
            continue
        model = onnx.load_model(path, load_external_data=False)
        int4.rewrite(model.graph)
        rewrite(model, form)
        # ONNX Runtime would inline the functions itself, but 1.23, the last for Python 3.10, checks
        # shapes before that and finds none.
        inlined = onnx.inliner.inline_local_functions(model)
        _type_contrib_outputs(inlined.graph)
        simplify(inlined)
        onnx.save_model(inlined, path)
        finished.append(inlined)
    int4.trim(model.graph for model in finished)


def rewrite(model: onnx.ModelProto, form: Form) -> None:
    """Turn the portable `model` into the in-place form; mutates it."""
    graph = model.graph
    missing = set(_REPLACED_INPUTS) - {value.name for value in graph.input}
    if missing:
        raise BuildError(f"not a portable model: it has no input {min(missing)!r}")
    _take_logit_rows(graph)
    num_heads = max(_size(n, "num_heads") for n in graph.node if n.op_type in _ATTENTION)
    for node in list(graph.node):
        if node.domain == DOMAIN and node.op_type in form.calls:
            form.calls[node.op_type](graph, node)
    _drop_unused(graph)
    inputs = [value for value in graph.input if value.name not in _REPLACED_INPUTS]
    inputs += [
        helper.make_tensor_value_info("slot_mapping", INT64, ("slots", 2)),
        helper.make_tensor_value_info("logit_rows", INT64, ("R",)),
    ]
    _replace(graph.input, inputs)
    form.finish(graph)
    _replace_functions(model, form.functions(num_heads))
    model.opset_import.add(domain=CONTRIB_DOMAIN, version=CONTRIB_VERSION)


def _type_contrib_outputs(graph: onnx.GraphProto) -> None:
    """Say what ONNX cannot infer: the runtime's own operators give the model's type, as pools have.

    Else Casts of their outputs to the type that they have would stay.
    """
    pool = next(value for value in graph.input if "_pool." in value.name)
    kind = pool.type.tensor_type.elem_type
    given = {value.name for value in graph.output}
    outputs = [n for node in graph.node if node.domain == CONTRIB_DOMAIN for n in node.output]
    graph.value_info.extend(
        helper.make_tensor_value_info(name, kind, None) for name in outputs if name not in given
    )


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
    node.op_type = "LatentAttentionInPlace"
    node.input.append("slot_mapping")
    _return_pool(graph, node, 1, node.input[8])


def _latent_attention_by_head(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    _latent_attention(graph, node)
    q, kv_a, kv_norm, w_uk, w_uv, *step = node.input
    by_head = [*_split_by_head(graph, w_uk), *_split_by_head(graph, w_uv)]
    _replace(node.input, [q, kv_a, kv_norm, *by_head, *step])


def _latent_attention_int8(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    node.op_type = "LatentAttentionInt8InPlace"
    node.input.append("slot_mapping")
    _return_pool(graph, node, 1, node.input[10])


def _grouped_query_attention(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    node.op_type = "GroupedQueryAttentionInPlace"
    node.input.append("slot_mapping")
    for index, pool in enumerate(node.input[6:8], start=1):
        _return_pool(graph, node, index, pool)


def _with_blank_rows(
    attention: Callable[[onnx.GraphProto, onnx.NodeProto], None],
) -> Callable[[onnx.GraphProto, onnx.NodeProto], None]:
    """Let the rewritten call also clear slots; every layer shares the blank rows."""

    def rewritten(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
        attention(graph, node)
        node.input[list(node.input).index("slot_mapping")] = "pool_index"
        node.input.append("blank_rows")
        if graph.node[0].op_type != "BlankRows":
            pool = next(name for name in node.input if "_pool." in name)
            inputs = ["input_ids", "slot_mapping", pool]
            outputs = ["blank_rows", "pool_index"]
            blank = helper.make_node("BlankRows", inputs, outputs, name="blank_rows", domain=DOMAIN)
            graph.node.insert(0, blank)

    return rewritten


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


def _sparse_experts(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    node.op_type = "ExpertsSparse"


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


def _give_best(graph: onnx.GraphProto) -> None:
    """Widen the logits, and give the likeliest tokens of each row as well: see BestTokens.

    A greedy step then reads a few numbers a row from the device, not the whole vocabulary.
    """
    narrow, wide = "logits.narrow", "logits"
    producer = next(node for node in graph.node if wide in node.output)
    _replace(producer.output, [narrow if name == wide else name for name in producer.output])
    logits = next(value for value in graph.output if value.name == wide)
    logits.type.tensor_type.elem_type = FLOAT
    count = min(NUM_BEST, logits.type.tensor_type.shape.dim[1].dim_value)
    outputs = {"best_logits": (FLOAT, count), "best_ids": (INT64, count), "best_totals": (FLOAT, 1)}
    cast = helper.make_node("Cast", [narrow], [wide], name=wide, to=FLOAT)
    best = helper.make_node(
        "BestTokens", [wide], list(outputs), name="best", domain=DOMAIN, count=[count]
    )
    graph.node.extend([cast, best])
    graph.output.extend(
        helper.make_tensor_value_info(name, kind, ("R", columns))
        for name, (kind, columns) in outputs.items()
    )


_ATTENTION = ("LatentAttention", "LatentAttentionInt8", "GroupedQueryAttention")
CPU = Form(
    {
        "AttentionMask": _mask,
        "LatentAttention": _latent_attention_by_head,
        "LatentAttentionInt8": _latent_attention_int8,
        "GroupedQueryAttention": _grouped_query_attention,
        "Experts": _experts,
    },
    cpu_functions,
    widen,
)
CUDA = Form(
    {
        "AttentionMask": _mask,
        "LatentAttention": _with_blank_rows(_latent_attention),
        "GroupedQueryAttention": _with_blank_rows(_grouped_query_attention),
        "Experts": _sparse_experts,
    },
    lambda num_heads: cuda_functions(),
    _give_best,
)


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


def _replace_functions(model: onnx.ModelProto, ours: Mapping[str, onnx.FunctionProto]) -> None:
    """Keep the functions that are called, directly or through each other, ours before portable."""
    library = {f.name: f for f in model.functions} | dict(ours)
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
