"""Hugging Face's tensor names of DeepSeek models, and their shapes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.checkpoint.spec import (
    GroupedQueryAttentionSpec,
    LatentAttentionSpec,
    ModelSpec,
    MoESpec,
)
from deepseek_triton.errors import CheckpointError

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

_WEIGHT_DTYPES = ("float32", "float16", "bfloat16")
_MAX_REPORTED = 10
_MAX_COUNTED = 100_000  # then the config is another model's: stop looking


class NamedShape(NamedTuple):
    """One tensor of a checkpoint; linear weights are [outputs, inputs]."""

    name: str
    shape: tuple[int, ...]


def layer_prefix(layer: int) -> str:
    """Return what the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


def expected_tensors(spec: ModelSpec) -> Iterator[NamedShape]:
    """Yield every tensor that a checkpoint of `spec` must hold, in the order of computation."""
    yield NamedShape(EMBEDDING, (spec.vocab_size, spec.hidden_size))
    for layer in range(spec.num_layers):
        yield from _layer(spec, layer, has_experts=layer in spec.moe_layers)
    yield NamedShape(FINAL_NORM, (spec.hidden_size,))
    if not spec.tie_word_embeddings:
        yield NamedShape(LM_HEAD, (spec.vocab_size, spec.hidden_size))


def draft_tensors(spec: ModelSpec) -> Iterator[NamedShape]:
    """Yield the tensors of the first multi-token-prediction layer, beside those of the model.

    DeepSeek numbers it after the model's own layers and repeats embedding and head, which are the
    model's own and are not read.
    """
    prefix, size = layer_prefix(spec.num_layers), spec.hidden_size
    yield NamedShape(prefix + "enorm.weight", (size,))
    yield NamedShape(prefix + "hnorm.weight", (size,))
    yield NamedShape(prefix + "eh_proj.weight", (size, 2 * size))
    yield from _layer(spec, spec.num_layers, has_experts=True)
    yield NamedShape(prefix + "shared_head.norm.weight", (size,))


def _layer(spec: ModelSpec, layer: int, *, has_experts: bool) -> Iterator[NamedShape]:
    prefix = layer_prefix(layer)
    yield NamedShape(prefix + "input_layernorm.weight", (spec.hidden_size,))
    if isinstance(spec.attention, LatentAttentionSpec):
        yield from _latent_attention(spec.attention, prefix + "self_attn.", spec.hidden_size)
    else:
        yield from _grouped_query(spec.attention, prefix + "self_attn.", spec.hidden_size)
    yield NamedShape(prefix + "post_attention_layernorm.weight", (spec.hidden_size,))
    if spec.moe is not None and has_experts:
        yield from _experts(spec.moe, prefix + "mlp.", spec.hidden_size)
    else:
        yield from _mlp(prefix + "mlp.", spec.hidden_size, spec.intermediate_size)


def _grouped_query(
    attention: GroupedQueryAttentionSpec, prefix: str, hidden: int
) -> Iterator[NamedShape]:
    query_width, bias = attention.num_heads * attention.head_dim, attention.qkv_bias
    yield from _linear(prefix + "q_proj", query_width, hidden, bias)
    yield from _linear(prefix + "k_proj", attention.pool_width, hidden, bias)
    yield from _linear(prefix + "v_proj", attention.pool_width, hidden, bias)
    yield from _linear(prefix + "o_proj", hidden, query_width, attention.o_bias)


def _latent_attention(
    attention: LatentAttentionSpec, prefix: str, hidden: int
) -> Iterator[NamedShape]:
    query_width = attention.num_heads * attention.qk_head_dim
    value_width = attention.num_heads * attention.v_head_dim
    key_value_width = attention.num_heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    rank = attention.q_lora_rank
    if rank is None:
        yield NamedShape(prefix + "q_proj.weight", (query_width, hidden))
    else:
        yield from _linear(prefix + "q_a_proj", rank, hidden, attention.bias)
        yield NamedShape(prefix + "q_a_layernorm.weight", (rank,))
        yield NamedShape(prefix + "q_b_proj.weight", (query_width, rank))
    yield from _linear(
        prefix + "kv_a_proj_with_mqa", attention.latent_width, hidden, attention.bias
    )
    yield NamedShape(prefix + "kv_a_layernorm.weight", (attention.kv_lora_rank,))
    yield NamedShape(prefix + "kv_b_proj.weight", (key_value_width, attention.kv_lora_rank))
    yield from _linear(prefix + "o_proj", hidden, value_width, attention.bias)


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Iterator[NamedShape]:
    yield NamedShape(name + ".weight", (outputs, inputs))
    if bias:
        yield NamedShape(name + ".bias", (outputs,))


def _experts(moe: MoESpec, prefix: str, hidden: int) -> Iterator[NamedShape]:
    routing = moe.routing
    yield NamedShape(prefix + "gate.weight", (routing.num_experts, hidden))
    if routing.kind == "sigmoid":
        yield NamedShape(prefix + "gate.e_score_correction_bias", (routing.num_experts,))
    for expert in range(routing.num_experts):
        yield from _mlp(f"{prefix}experts.{expert}.", hidden, moe.expert_intermediate_size)
    if moe.shared_intermediate_size:
        yield from _mlp(prefix + "shared_experts.", hidden, moe.shared_intermediate_size)


def _mlp(prefix: str, hidden: int, intermediate: int) -> Iterator[NamedShape]:
    yield NamedShape(prefix + "gate_proj.weight", (intermediate, hidden))
    yield NamedShape(prefix + "up_proj.weight", (intermediate, hidden))
    yield NamedShape(prefix + "down_proj.weight", (hidden, intermediate))


def validate_checkpoint(reader: CheckpointReader, spec: ModelSpec, *, draft: bool = False) -> None:
    """Check that every tensor of `spec` is there with its shape and a float dtype, reading no data.

    `draft` asks for a multi-token-prediction layer as well.

    Raises one CheckpointError that lists the first ten problems and counts the rest. Tensors that
    nothing uses are logged: multi-token-prediction layers at INFO, unknown names at WARNING.
    """
    expected = set()
    problems: list[str] = []
    wanted = chain(expected_tensors(spec), draft_tensors(spec) if draft else ())
    for name, shape in wanted:
        expected.add(name)
        if (problem := _problem(reader, name, shape)) is not None:
            problems.append(problem)
            if len(problems) == _MAX_COUNTED:
                break
    if problems:
        shown = problems[:_MAX_REPORTED]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        count = f"{len(problems)}{' or more' if len(problems) == _MAX_COUNTED else ''}"
        raise CheckpointError(
            f"the checkpoint does not fit its config.json, {count} tensor(s) wrong:\n  "
            + "\n  ".join(shown)
        )
    _log_unused(reader, spec, expected)


def _problem(reader: CheckpointReader, name: str, shape: tuple[int, ...]) -> str | None:
    if name not in reader:
        return f"{name}: missing"
    if reader.shape(name) != shape:
        return (
            f"{name} in {reader.file(name)}: found shape {list(reader.shape(name))}, "
            f"expected {list(shape)}"
        )
    dtype = reader.dtype(name).name
    if dtype not in _WEIGHT_DTYPES:
        return f"{name} in {reader.file(name)}: dtype {dtype} is not supported yet"
    return None


def _log_unused(reader: CheckpointReader, spec: ModelSpec, expected: set[str]) -> None:
    prediction, unknown = 0, []
    for name in reader.names():
        if name in expected or name.endswith("rotary_emb.inv_freq"):
            continue
        if name == LM_HEAD and spec.tie_word_embeddings:
            continue
        match = re.match(r"model\.layers\.(\d+)\.", name)
        if match and int(match[1]) >= spec.num_layers:
            prediction += 1
        else:
            unknown.append(name)
    if prediction:
        logger.info("ignoring %d tensors of multi-token-prediction layers", prediction)
    if unknown:
        logger.warning("ignoring %d unknown tensors, the first is %s", len(unknown), unknown[0])
