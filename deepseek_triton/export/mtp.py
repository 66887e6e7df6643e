"""The multi-token-prediction layer as a draft model: the token after next (arXiv 2412.19437, 2.2).

It reads, for the token at position i, the model's hidden state there and the token at i + 1:

    hidden_i ──final norm──hnorm──┐
                                  ├─concat─▶ eh_proj ─▶ decoder layer ─▶ norm ─▶ lm_head ─▶ i + 2
    token i+1 ──embedding──enorm──┘

Inputs as the model's own (export/portable.py), where input_ids holds the tokens at i + 1 and
positions, tables and lengths are those of i; and `hidden` [B·S, D], the model's own output.
Its one pool is `kv_pool.<L>`, L being the number of layers. Outputs: logits [B, V], new_kv.<L>.
Embedding, head and final norm are the model's own weights.
"""

from __future__ import annotations

import onnx

from deepseek_triton.checkpoint.names import FINAL_NORM, layer_prefix
from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.export.attention import new_row_outputs, pool_inputs
from deepseek_triton.export.decoder import (
    decoder_layer,
    embed,
    last_rows,
    output_logits,
    step_values,
)
from deepseek_triton.export.graph import GraphBuilder
from deepseek_triton.export.modules import ModuleWriter, Projection
from deepseek_triton.export.weights import TensorReader


def write_draft_graph(
    graph: GraphBuilder, spec: ModelSpec, reader: TensorReader, block_size: int
) -> None:
    """Append the draft model to `graph`, whose weight file is the model's own.

    Raises CheckpointError for a missing or misshapen tensor.
    """
    real, layer, size = graph.precision.onnx_type, spec.num_layers, spec.hidden_size
    modules = ModuleWriter(graph, spec, reader)
    ids = graph.input("input_ids", onnx.TensorProto.INT32, ("B", "S"))
    hidden = graph.input("hidden", real, ("T", size))
    step = step_values(graph, spec, block_size)
    last_token = graph.input("last_token", onnx.TensorProto.INT32, ("B",))
    pool_inputs(graph, spec, layer, block_size)

    def norm(x: str, name: str, source: str) -> str:
        return modules.rms_norm(x, name, source, size, spec.rms_norm_eps)

    source, name = layer_prefix(layer), f"layers.{layer}"
    normed = norm(hidden, "final_norm", FINAL_NORM.removesuffix(".weight"))
    parts = [
        norm(embed(modules, ids), f"{name}.enorm", source + "enorm"),
        norm(normed, f"{name}.hnorm", source + "hnorm"),
    ]
    joined = graph.node("Concat", parts, f"{name}.joined", axis=-1)
    projection = Projection(source + "eh_proj", size)
    mixed = modules.linear(joined, f"{name}.eh_proj", 2 * size, [projection])
    output = decoder_layer(modules, layer, mixed, step)
    last = last_rows(graph, output, ids, last_token)
    logits = output_logits(modules, norm(last, f"{name}.norm", source + "shared_head.norm"))
    graph.output(logits, real, ("B", spec.vocab_size))
    new_row_outputs(graph, spec, layer)
