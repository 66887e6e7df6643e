"""A checkpoint's config.json as a ModelSpec.

Keys that are absent take the defaults of transformers' configuration classes: a checkpoint means
here what it means there. Whatever would change the numbers and is not implemented is refused by
name, never ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepseek_triton.checkpoint.attention_config import read_attention, read_rope
from deepseek_triton.checkpoint.experts_config import read_experts
from deepseek_triton.checkpoint.families import FAMILIES, Family, find_architecture
from deepseek_triton.checkpoint.fields import Fields, describe, read_json_object
from deepseek_triton.checkpoint.spec import Architecture, ModelSpec
from deepseek_triton.errors import CheckpointError, UnsupportedModelError

logger = logging.getLogger(__name__)

MAX_LAYERS = 4096
WEIGHT_DTYPES = ("float32", "float16", "bfloat16")


def read_model_spec(checkpoint_dir: Path | str) -> ModelSpec:
    """Read config.json, and generation_config.json for the end ids, of a checkpoint folder.

    Raises CheckpointError for a missing file or a bad value (naming file and key) and
    UnsupportedModelError for a model or feature that is not implemented.
    """
    path = find_config(checkpoint_dir)
    generation_path = path.with_name("generation_config.json")
    generation = read_json_object(generation_path) if generation_path.is_file() else {}
    return model_spec_from_config(read_json_object(path), generation, where=str(path))


def find_config(checkpoint_dir: Path | str) -> Path:
    """Return the path of config.json; raise CheckpointError if folder or file do not exist."""
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint {folder}: the folder does not exist")
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path}: not found; a checkpoint is a folder in Hugging Face form, with config.json, "
            "safetensors files and tokenizer.json"
        )
    return path


def model_spec_from_config(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    *,
    where: str = "config.json",
) -> ModelSpec:
    """Return the ModelSpec of a config that is already parsed; `where` names it in messages."""
    architecture = find_architecture(config, where)
    family = FAMILIES[architecture]
    fields = Fields(config, where)
    _refuse_unsupported(fields, architecture, family)
    _warn_of_ignored_dtype(fields)
    vocab_size = fields.integer("vocab_size", family.vocab_size)
    num_layers = fields.integer("num_hidden_layers", family.num_hidden_layers, maximum=MAX_LAYERS)
    first_moe = num_layers
    if family.experts is not None:
        default = family.experts.first_k_dense_replace
        first_moe = fields.integer("first_k_dense_replace", default, minimum=0)
    max_positions = fields.integer("max_position_embeddings", family.max_position_embeddings)
    rope = read_rope(fields, architecture, family, max_positions)
    bos, eos = _special_ids(fields, generation_config or {}, family, vocab_size)
    moe = None
    if family.experts is not None and first_moe < num_layers:
        moe = read_experts(fields, architecture, family.experts)
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size", family.hidden_size),
        num_layers=num_layers,
        intermediate_size=fields.integer("intermediate_size", family.intermediate_size),
        moe_layers=tuple(range(first_moe, num_layers)),
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention=read_attention(fields, architecture, family, rope),
        rope=rope,
        moe=moe,
        bos_token_id=bos,
        eos_token_ids=eos,
    )


def _refuse_unsupported(fields: Fields, architecture: Architecture, family: Family) -> None:
    """Refuse keys whose value asks for something that the reference or this package lacks."""
    allowed = {"hidden_act": ("silu",), "mlp_bias": (False,), **family.allowed}
    for key, values in allowed.items():
        value = fields.values.get(key)
        if value is not None and value not in values:
            expected = " or ".join(describe(v) for v in values)
            raise UnsupportedModelError(
                f"{fields.where}: {key} {describe(value)} is not supported for {architecture}; "
                f"it must be {expected}"
            )


def _special_ids(
    fields: Fields, generation_config: Mapping[str, Any], family: Family, vocab_size: int
) -> tuple[int | None, tuple[int, ...]]:
    """Return (bos, end ids); generation_config.json wins, as when transformers generates."""
    generation = Fields(
        generation_config, str(Path(fields.where).parent / "generation_config.json")
    )
    found = {}
    for key, default in (
        ("eos_token_id", family.eos_token_id),
        ("bos_token_id", family.bos_token_id),
    ):
        if not generation.has(key):
            found[key] = _ids_in_vocabulary(fields, key, default, vocab_size)
            continue
        found[key] = _ids_in_vocabulary(generation, key, None, vocab_size)
        try:
            _ids_in_vocabulary(fields, key, None, vocab_size)
        except CheckpointError as error:
            logger.warning("%s; ignored, %s decides", error, generation.where)
    bos = found["bos_token_id"]
    return (bos[0] if bos else None), found["eos_token_id"]


def _ids_in_vocabulary(
    source: Fields, key: str, default: int | None, vocab_size: int
) -> tuple[int, ...]:
    ids = source.token_ids(key, default)
    if ids and max(ids) >= vocab_size:
        raise source.error(key, f"{max(ids)} is outside the vocabulary of {vocab_size} tokens")
    return ids


def _warn_of_ignored_dtype(fields: Fields) -> None:
    for key in ("torch_dtype", "dtype"):  # transformers 5 writes the second
        if fields.has(key) and fields.values[key] not in WEIGHT_DTYPES:
            logger.warning(
                "%s: %s %s is ignored: weights are read in the dtype that they are stored in",
                fields.where, key, describe(fields.values[key]),
            )  # fmt: skip
