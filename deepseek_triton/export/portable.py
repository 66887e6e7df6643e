"""ModelSpec and weights to the portable ONNX model: a folder with model.onnx and weights.bin.

Inputs of one step, padded to B rows of S tokens, with block tables padded to M ≥ 1 blocks:
    input_ids[B,S] positions[B,S] context_lens[B] block_tables[B,M] last_token[B]   int32
    kv_pool.<l>[num_blocks, block_size, W]    one a layer, all values finite
Outputs:
    logits[B,V]           of the token at last_token in each row
    new_kv.<l>[B,S,W]     rows to write into the pools at the tokens' slots
Padding has position −1; its rows of new_kv mean nothing and must not be written.
`layers.<l>.output` [B·S, D] inside the graph is the hidden state after layer l.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

from deepseek_triton.checkpoint.names import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix
from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.errors import BuildError, ConfigError
from deepseek_triton.export.attention import StepValues, latent_attention
from deepseek_triton.export.graph import GraphBuilder
from deepseek_triton.export.mlp import gated_mlp, mixture_of_experts
from deepseek_triton.export.modules import ModuleWriter
from deepseek_triton.export.precision import find_precision
from deepseek_triton.export.rope import attention_factor, inverse_frequencies, quarter_turn
from deepseek_triton.export.weights import TensorReader

logger = logging.getLogger(__name__)

MODEL_FILE = "model.onnx"
WEIGHTS_FILE = "weights.bin"
INT32 = onnx.TensorProto.INT32


def export_portable(
    spec: ModelSpec,
    reader: TensorReader,
    out_dir: Path,
    *,
    precision: str = "fp32",
    block_size: int = 16,
) -> Path:
    """Write the portable model of `spec` into the new folder `out_dir`; return the model's path.

    The folder appears complete or not at all. Memory stays near one checkpoint tensor whatever the
    model's size. Raises ConfigError for an unknown precision or block size, CheckpointError for a
    missing or misshapen tensor, BuildError when the folder cannot be written.
    """
    if block_size < 1:
        raise ConfigError(f"block_size must be at least 1, not {block_size}")
    graph = GraphBuilder(find_precision(precision))
    write_graph(graph, spec, reader, block_size)
    with _new_folder(out_dir, graph.weights.nbytes) as folder:
        graph.weights.write(folder / WEIGHTS_FILE, reader.release)
        onnx.save_model(graph.model(spec.architecture, WEIGHTS_FILE), folder / MODEL_FILE)
    logger.info("exported %s, %.1f MB of weights", out_dir, graph.weights.nbytes / 1e6)
    return out_dir / MODEL_FILE


def write_graph(
    graph: GraphBuilder, spec: ModelSpec, reader: TensorReader, block_size: int
) -> None:
    """Append the whole model to `graph`, declaring its inputs, outputs and weights."""
    real = graph.precision.onnx_type
    modules = ModuleWriter(graph, spec, reader)
    ids = graph.input("input_ids", INT32, ("B", "S"))
    step = _step_values(graph, spec, block_size)
    last_token = graph.input("last_token", INT32, ("B",))

    vocabulary = (spec.vocab_size, spec.hidden_size)
    embedding = graph.weight(
        "embedding.weight", vocabulary, [reader.require(EMBEDDING, vocabulary)]
    )
    flat_ids = graph.node("Reshape", [ids, graph.constant("flat", np.array([-1]))], "embedding.ids")
    hidden = graph.node("Gather", [embedding, flat_ids], "embedding", axis=0)

    width = spec.attention.latent_width
    for layer in range(spec.num_layers):
        graph.input(f"kv_pool.{layer}", real, ("num_blocks", block_size, width))
        hidden = _layer(modules, layer, hidden, step)

    last = _last_rows(graph, hidden, ids, last_token)
    size, epsilon = spec.hidden_size, spec.rms_norm_eps
    source = FINAL_NORM.removesuffix(".weight")
    normed = modules.rms_norm(last, "final_norm", source, size, epsilon)
    if spec.tie_word_embeddings:
        head = embedding
    else:
        head = graph.weight("lm_head.weight", vocabulary, [reader.require(LM_HEAD, vocabulary)])
    logits = graph.node("deepseek.Linear", [normed, head], "logits")
    graph.output(logits, real, ("B", spec.vocab_size))
    for layer in range(spec.num_layers):
        graph.output(f"new_kv.{layer}", real, ("B", "S", width))


def _step_values(graph: GraphBuilder, spec: ModelSpec, block_size: int) -> StepValues:
    """Append what every layer needs of the step: rotary angles and the attention mask."""
    positions = graph.input("positions", INT32, ("B", "S"))
    context_lens = graph.input("context_lens", INT32, ("B",))
    block_tables = graph.input("block_tables", INT32, ("B", "M"))
    frequencies = graph.constant("rotary.inv_freq", inverse_frequencies(spec.rope))
    turn = quarter_turn(spec.rope).astype(graph.precision.dtype)
    cos, sin = graph.pair(
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


def _layer(modules: ModuleWriter, layer: int, hidden: str, step: StepValues) -> str:
    """Append one decoder layer over hidden [T, D]; return `layers.<l>.output` [T, D]."""
    graph, spec = modules.graph, modules.spec
    size, epsilon = spec.hidden_size, spec.rms_norm_eps
    name, source = f"layers.{layer}", layer_prefix(layer)
    normed = modules.rms_norm(
        hidden, f"{name}.attention_norm", source + "input_layernorm", size, epsilon
    )
    attended = latent_attention(modules, normed, layer, step)
    middle = graph.node("Add", [hidden, attended], f"{name}.attention_residual")
    normed = modules.rms_norm(
        middle, f"{name}.mlp_norm", source + "post_attention_layernorm", size, epsilon
    )
    if spec.moe is not None and layer in spec.moe_layers:
        mixed = mixture_of_experts(modules, normed, f"{name}.mlp", source + "mlp.", spec.moe)
    else:
        mixed = gated_mlp(modules, normed, f"{name}.mlp", source + "mlp.", spec.intermediate_size)
    return graph.node("Add", [middle, mixed], f"{name}.output")


def _last_rows(graph: GraphBuilder, hidden: str, ids: str, last_token: str) -> str:
    """Append the choice of one row of hidden [B·S, D] for each of the B rows; return [B, D]."""
    batch_shape = graph.node("Shape", [ids], "last.batch_shape")
    rest = graph.constant("last.rest", np.array([-1]))
    shape = graph.node("Concat", [batch_shape, rest], "last.shape", axis=0)
    batched = graph.node("Reshape", [hidden, shape], "last.batched")
    index = graph.node("Cast", [last_token], "last.index", to=onnx.TensorProto.INT64)
    column = graph.node("Unsqueeze", [index, rest], "last.column")
    return graph.node("GatherND", [batched, column], "last", batch_dims=1)


@contextlib.contextmanager
def _new_folder(out_dir: Path, nbytes: int) -> Iterator[Path]:
    """Give a temporary sibling of `out_dir`, renamed to it at the end; removed on any error.

    `nbytes` is what will be written, so that a full disk is told before anything is.
    """
    temporary: Path | None = None
    try:
        if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
            raise BuildError(f"{out_dir} exists already; remove it or choose another folder")
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
        temporary.chmod(0o755)  # mkdtemp makes it private
        if shutil.disk_usage(temporary).free < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield temporary
        temporary.rename(out_dir)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.filename is not None:
            reason += f": {error.filename}"
        if error.errno == errno.ENOSPC:
            reason += f": the weights need {nbytes / 1e6:,.1f} MB; free space or use another disk"
        raise BuildError(f"{out_dir} cannot be written: {reason}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
