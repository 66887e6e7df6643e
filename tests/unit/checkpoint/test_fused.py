from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.names import validate_checkpoint
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.errors import CheckpointError, UnsupportedModelError
from deepseek_triton.quantize.checkpoint import open_checkpoint

HEADS, GROUPS, SIZE = 6, 2, 16
CONFIG = preset_config("qwen2") | {
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": SIZE,
    "hidden_size": HEADS * SIZE,
    "num_hidden_layers": 1,
    "tie_word_embeddings": True,
}


def grouped(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> NDArray[Any]:
    """For each key-value head: its query heads, its key, its value."""
    rows = []
    for group in range(GROUPS):
        for head in range(group * HEADS // GROUPS, (group + 1) * HEADS // GROUPS):
            rows.append(q[head * SIZE : (head + 1) * SIZE])
        rows += [x[group * SIZE : (group + 1) * SIZE] for x in (k, v)]
    return np.concatenate(rows)


def interleaved(gate: NDArray[Any], up: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([row[None] for pair in zip(gate, up, strict=True) for row in pair])


def concatenated(*parts: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate(parts)


def write_fused(folder: Path, qkv: Any, gate_up: Any, **stated: str) -> CheckpointReader:
    """Fuse a random checkpoint's projections under `folder`; return the separate ones."""
    source = write_random_checkpoint(folder / "source", CONFIG)
    separate = CheckpointReader(source)
    tensors = {name: np.array(separate.read(name)) for name in separate.names()}
    layer = "model.layers.0."
    for kind in ("weight", "bias"):
        parts = [tensors.pop(f"{layer}self_attn.{p}_proj.{kind}") for p in "qkv"]
        tensors[f"{layer}self_attn.qkv_proj.{kind}"] = qkv(*parts)
    pair = [tensors.pop(f"{layer}mlp.{p}_proj.weight") for p in ("gate", "up")]
    tensors[f"{layer}mlp.gate_up_proj.weight"] = gate_up(*pair)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | stated))
    return separate


@pytest.mark.parametrize(
    ("qkv", "gate_up", "layouts"),
    [
        (concatenated, concatenated, ("concatenated", "concatenated")),
        (grouped, interleaved, ("grouped", "interleaved")),
    ],
)
def test_fused_projections_are_split_by_the_stated_layout(
    tmp_path: Path, qkv: Any, gate_up: Any, layouts: tuple[str, str]
) -> None:
    separate = write_fused(tmp_path, qkv, gate_up, qkv_layout=layouts[0], gate_up_layout=layouts[1])
    spec = read_model_spec(tmp_path)
    reader = open_checkpoint(tmp_path, spec)
    validate_checkpoint(reader, spec)
    assert set(reader.names()) == set(separate.names())
    for name in separate.names():
        np.testing.assert_array_equal(
            reader.require(name, separate.shape(name)), separate.read(name)
        )


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (
            {"gate_up_layout": "concatenated"},
            'qkv_layout is missing: .*qkv_proj.*"concatenated" or "grouped"',
        ),
        ({"qkv_layout": "grouped"}, 'gate_up_layout is missing: .*"concatenated" or "interleaved"'),
        (
            {"qkv_layout": "by head", "gate_up_layout": "concatenated"},
            'qkv_layout "by head" is unknown',
        ),
    ],
)
def test_a_layout_that_is_not_stated_is_asked_for(
    tmp_path: Path, stated: dict[str, str], message: str
) -> None:
    write_fused(tmp_path, concatenated, concatenated, **stated)
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(tmp_path, read_model_spec(tmp_path))


def test_rows_that_the_heads_do_not_fill_are_refused(tmp_path: Path) -> None:
    write_fused(
        tmp_path,
        lambda *parts: np.concatenate(parts)[:-1],
        concatenated,
        qkv_layout="concatenated",
        gate_up_layout="concatenated",
    )
    with pytest.raises(CheckpointError, match="config.json asks for 160 rows"):
        open_checkpoint(tmp_path, read_model_spec(tmp_path))


def test_latent_attention_has_no_fused_projection(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.qkv_proj.weight"
    save_file({name: np.zeros((4, 4), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(preset_config("v3")))
    with pytest.raises(UnsupportedModelError, match="does not belong to a model with latent"):
        open_checkpoint(tmp_path, read_model_spec(tmp_path))
