"""ModelSpec and weights to the portable ONNX model: a folder with model.onnx and weights.bin.

Inputs of one step, padded to B rows of S tokens, with block tables padded to M ≥ 1 blocks:
    input_ids[B,S] positions[B,S] context_lens[B] block_tables[B,M] last_token[B]   int32
    <p>_pool.<l>[num_blocks, block_size, W]   all values finite
Outputs:
    logits[B,V]           of the token at last_token in each row
    squared_norms[B·S,1]  float32, of the hidden states after the last layer: not finite for a token
                          whose activations overflowed, whose logits may not be asked for
    new_<p>.<l>[B,S,W]    rows to write into the pools at the tokens' slots
A layer has the pool p = kv with latent attention, k and v with grouped-query attention.
Padding has position −1; its new rows mean nothing and must not be written.
`layers.<l>.output` [B·S, D] inside the graph is the hidden state after layer l.

With a draft (export/mtp.py) there is a third file, draft.onnx, and the model has one output more,
`hidden` [B·S, D]: what the last layer gives, before the final norm.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import onnx

from deepseek_triton.checkpoint.names import FINAL_NORM
from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.checkpoint.temporary import temporary_sibling
from deepseek_triton.checkpoint.writer import require_space
from deepseek_triton.errors import BuildError, ConfigError
from deepseek_triton.export.attention import new_row_outputs, pool_inputs
from deepseek_triton.export.decoder import (
    decoder_layer,
    embed,
    last_rows,
    output_logits,
    step_values,
)
from deepseek_triton.export.graph import GraphBuilder
from deepseek_triton.export.modules import ModuleWriter
from deepseek_triton.export.mtp import write_draft_graph
from deepseek_triton.export.precision import find_precision
from deepseek_triton.export.weights import TensorReader

logger = logging.getLogger(__name__)

MODEL_FILE = "model.onnx"
DRAFT_FILE = "draft.onnx"
WEIGHTS_FILE = "weights.bin"
INT32 = onnx.TensorProto.INT32


def export_portable(
    spec: ModelSpec,
    reader: TensorReader,
    out_dir: Path,
    *,
    precision: str = "fp32",
    block_size: int = 16,
    draft: bool = False,
) -> Path:
    """Write the portable model of `spec` into the new folder `out_dir`; return the model's path.

    `draft` adds the multi-token-prediction layer as a model of its own, which shares the weights.

    The folder appears complete or not at all. Memory stays near one checkpoint tensor whatever the
    model's size. Raises ConfigError for an unknown precision or block size, CheckpointError for a
    missing or misshapen tensor, BuildError when the folder cannot be written.
    """
    if block_size < 1:
        raise ConfigError(f"block_size must be at least 1, not {block_size}")
    graph = GraphBuilder(find_precision(precision))
    write_graph(graph, spec, reader, block_size)
    graphs = {MODEL_FILE: graph}
    if draft:
        output = f"layers.{spec.num_layers - 1}.output"
        hidden = graph.node("Identity", [output], "hidden")
        graph.output(hidden, graph.precision.onnx_type, ("T", spec.hidden_size))
        graphs[DRAFT_FILE] = GraphBuilder(graph.precision, graph.weights)
        write_draft_graph(graphs[DRAFT_FILE], spec, reader, block_size)
    with _new_folder(out_dir, graph.weights.nbytes) as folder:
        graph.weights.write(folder / WEIGHTS_FILE, reader.release)
        for name, built in graphs.items():
            onnx.save_model(built.model(spec.architecture, WEIGHTS_FILE), folder / name)
    logger.info("exported %s, %.1f MB of weights", out_dir, graph.weights.nbytes / 1e6)
    return out_dir / MODEL_FILE


def write_graph(
    graph: GraphBuilder, spec: ModelSpec, reader: TensorReader, block_size: int
) -> None:
    """Append the whole model to `graph`, declaring its inputs, outputs and weights."""
    real = graph.precision.onnx_type
    modules = ModuleWriter(graph, spec, reader)
    ids = graph.input("input_ids", INT32, ("B", "S"))
    step = step_values(graph, spec, block_size)
    last_token = graph.input("last_token", INT32, ("B",))

    hidden = embed(modules, ids)
    for layer in range(spec.num_layers):
        pool_inputs(graph, spec, layer, block_size)
        hidden = decoder_layer(modules, layer, hidden, step)

    last = last_rows(graph, hidden, ids, last_token)
    size, epsilon = spec.hidden_size, spec.rms_norm_eps
    source = FINAL_NORM.removesuffix(".weight")
    normed = modules.rms_norm(last, "final_norm", source, size, epsilon)
    logits = output_logits(modules, normed)
    graph.output(logits, real, ("B", spec.vocab_size))
    norms = graph.node("deepseek.SquaredNorm", [hidden], "squared_norms")
    graph.output(norms, onnx.TensorProto.FLOAT, ("T", 1))
    for layer in range(spec.num_layers):
        new_row_outputs(graph, spec, layer)


@contextlib.contextmanager
def _new_folder(out_dir: Path, nbytes: int) -> Iterator[Path]:
    """Give a temporary sibling of `out_dir`, renamed to it at the end; removed on any error.

    `nbytes` is what will be written, so that a full disk is told before anything is.
    """
    try:
        if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
            raise BuildError(f"{out_dir} exists already; remove it or choose another folder")
        with temporary_sibling(out_dir) as temporary:
            require_space(out_dir.parent, nbytes)
            yield temporary
            temporary.rename(out_dir)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.filename is not None:
            reason += f": {error.filename}"
        raise BuildError(f"{out_dir} cannot be written: {reason}") from error
