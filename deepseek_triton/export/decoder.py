"""What the model and its draft are made of: embedding, decoder layers, logits."""

from __future__ import annotations

import numpy as np
import onnx

from deepseek_triton.checkpoint.names import EMBEDDING, LM_HEAD, layer_prefix
from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.export.attention import StepValues, attention
from deepseek_triton.export.graph import GraphBuilder
from deepseek_triton.export.mlp import gated_mlp, mixture_of_experts
from deepseek_triton.export.modules import ModuleWriter
from deepseek_triton.export.rope import attention_factor, inverse_frequencies, quarter_turn

INT32 = onnx.TensorProto.INT32


def embed(modules: ModuleWriter, ids: str) -> str:
    """Append the embedding of ids [B, S]; return [B·S, D]."""
    graph = modules.graph
    flat_ids = graph.node("Reshape", [ids, graph.constant("flat", np.array([-1]))], "embedding.ids")
    return graph.node("Gather", [_embedding(modules), flat_ids], "embedding", axis=0)


def output_logits(modules: ModuleWriter, x: str) -> str:
    """Append the output layer over the normed rows x [R, D]; return `logits` [R, V]."""
    graph, spec = modules.graph, modules.spec
    if spec.tie_word_embeddings:
        head = _embedding(modules)
    else:
        shape = (spec.vocab_size, spec.hidden_size)
        head = modules.matrix("lm_head.weight", LM_HEAD, shape)
    return graph.node("deepseek.Linear", [x, head], "logits")


def _embedding(modules: ModuleWriter) -> str:
    shape = (modules.spec.vocab_size, modules.spec.hidden_size)
    return modules.matrix("embedding.weight", EMBEDDING, shape)


def step_values(graph: GraphBuilder, spec: ModelSpec, block_size: int) -> StepValues:
    """Append what every layer needs of the step: rotary angles and the attention mask."""
    positions = graph.input("positions", INT32, ("B", "S"))
    context_lens = graph.input("context_lens", INT32, ("B",))
    block_tables = graph.input("block_tables", INT32, ("B", "M"))
    frequencies = graph.constant("rotary.inv_freq", inverse_frequencies(spec.rope))
    turn = quarter_turn(spec.rope).astype(graph.precision.dtype)
    cos, sin = graph.node_with(
        "deepseek.RotaryAngles",
        [positions, frequencies],
        "rotary.angles",
        ("rotary.cos", "rotary.sin"),
        scale=attention_factor(spec.rope),
    )
    mask = graph.node(
        "deepseek.AttentionMask",
        [positions, context_lens, block_tables],
        "attention_mask",
        block_size=[block_size],
    )
    return StepValues(cos, sin, graph.constant("rotary.turn", turn), mask, block_tables)


def decoder_layer(modules: ModuleWriter, layer: int, hidden: str, step: StepValues) -> str:
    """Append one decoder layer over hidden [T, D]; return `layers.<l>.output` [T, D]."""
    graph, spec = modules.graph, modules.spec
    size, epsilon = spec.hidden_size, spec.rms_norm_eps
    name, source = f"layers.{layer}", layer_prefix(layer)
    normed = modules.rms_norm(
        hidden, f"{name}.attention_norm", source + "input_layernorm", size, epsilon
    )
    attended = attention(modules, normed, layer, step)
    middle = graph.node("Add", [hidden, attended], f"{name}.attention_residual")
    normed = modules.rms_norm(
        middle, f"{name}.mlp_norm", source + "post_attention_layernorm", size, epsilon
    )
    # The multi-token-prediction layers, which follow the model's own, have experts as well.
    if spec.moe is not None and (layer in spec.moe_layers or layer >= spec.num_layers):
        mixed = mixture_of_experts(modules, normed, f"{name}.mlp", source + "mlp.", spec.moe)
    else:
        mixed = gated_mlp(modules, normed, f"{name}.mlp", source + "mlp.", spec.intermediate_size)
    return graph.node("Add", [middle, mixed], f"{name}.output")


def last_rows(graph: GraphBuilder, hidden: str, ids: str, last_token: str) -> str:
    """Append the choice of one row of hidden [B·S, D] for each of the B rows; return [B, D]."""
    batch_shape = graph.node("Shape", [ids], "last.batch_shape")
    rest = graph.constant("last.rest", np.array([-1]))
    shape = graph.node("Concat", [batch_shape, rest], "last.shape", axis=0)
    batched = graph.node("Reshape", [hidden, shape], "last.batched")
    index = graph.node("Cast", [last_token], "last.index", to=onnx.TensorProto.INT64)
    column = graph.node("Unsqueeze", [index, rest], "last.column")
    return graph.node("GatherND", [batched, column], "last", batch_dims=1)
