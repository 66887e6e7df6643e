from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from deepseek_triton.checkpoint.config import model_spec_from_config
from deepseek_triton.checkpoint.names import expected_tensors, validate_checkpoint
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.errors import CheckpointError

TINY = {"hidden_size": 16, "vocab_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8}


def tiny_spec(arch: str = "v3", **changes: Any) -> ModelSpec:
    return model_spec_from_config(preset_config(arch) | TINY | changes)


def tiny_tensors(spec: ModelSpec) -> dict[str, Any]:
    return {name: np.zeros(shape, np.float16) for name, shape in expected_tensors(spec)}


def reader_of(folder: Path, tensors: dict[str, Any]) -> CheckpointReader:
    save_file(tensors, folder / "model.safetensors")
    return CheckpointReader(folder)


def test_a_complete_checkpoint_passes_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = tiny_spec()
    with caplog.at_level(logging.INFO):
        validate_checkpoint(reader_of(tmp_path, tiny_tensors(spec)), spec)
    assert not caplog.records


def test_names_follow_the_architecture() -> None:
    lite = dict(expected_tensors(tiny_spec("v2-lite")))
    v3 = dict(expected_tensors(tiny_spec("v3")))
    assert lite["model.layers.0.self_attn.q_proj.weight"] == (4 * 48, 16)
    assert v3["model.layers.0.self_attn.q_b_proj.weight"] == (4 * 48, 96)
    assert v3["model.layers.0.self_attn.kv_b_proj.weight"] == (4 * 64, 64)
    assert "model.layers.0.mlp.gate_proj.weight" in v3
    assert "model.layers.1.mlp.gate_proj.weight" not in v3
    assert v3["model.layers.1.mlp.experts.15.down_proj.weight"] == (16, 8)
    assert v3["model.layers.3.mlp.gate.e_score_correction_bias"] == (16,)
    assert lite["model.layers.1.mlp.shared_experts.up_proj.weight"] == (16, 16)
    assert not any("e_score_correction_bias" in name for name in lite)


def test_bias_tied_embeddings_and_shared_experts_change_the_names() -> None:
    plain = dict(expected_tensors(tiny_spec()))
    biased = dict(expected_tensors(tiny_spec(attention_bias=True)))
    added = {name.split("self_attn.")[1] for name in biased.keys() - plain.keys()}
    assert added == {"q_a_proj.bias", "kv_a_proj_with_mqa.bias", "o_proj.bias"}
    tied = dict(expected_tensors(tiny_spec(tie_word_embeddings=True)))
    assert plain.keys() - tied.keys() == {"lm_head.weight"}
    alone = dict(expected_tensors(tiny_spec(n_shared_experts=0)))
    assert not any("shared_experts" in name for name in alone)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    spec = tiny_spec()
    tensors = tiny_tensors(spec)
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = np.zeros((9, 16), np.float32)
    tensors["model.layers.2.input_layernorm.weight"] = np.zeros(16, np.int8)
    with pytest.raises(CheckpointError) as caught:
        validate_checkpoint(reader_of(tmp_path, tensors), spec)
    message = str(caught.value)
    assert "3 tensor(s) wrong" in message
    assert "model.norm.weight: missing" in message
    assert "found shape [9, 16], expected [8, 16]" in message
    assert "model.layers.2.input_layernorm.weight" in message
    assert "dtype int8 is not supported yet" in message


def test_only_ten_problems_are_spelled_out(tmp_path: Path) -> None:
    spec = tiny_spec()
    tensors = {k: v for k, v in tiny_tensors(spec).items() if ".experts.3." not in k}
    tensors = {k: v for k, v in tensors.items() if ".experts.4." not in k}
    with pytest.raises(CheckpointError, match="18 tensor") as caught:
        validate_checkpoint(reader_of(tmp_path, tensors), spec)
    assert str(caught.value).count(": missing") == 10
    assert str(caught.value).endswith("and 8 more")


def test_the_count_of_problems_ends_where_the_config_is_another_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepseek_triton.checkpoint.names._MAX_COUNTED", 12)
    with pytest.raises(CheckpointError, match="12 or more tensor") as caught:
        validate_checkpoint(reader_of(tmp_path, {"odd": np.zeros(2, np.float32)}), tiny_spec())
    assert str(caught.value).endswith("and 2 more")


def test_prediction_layers_and_old_rotary_tables_are_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = tiny_spec()
    extra = {
        "model.layers.4.eh_proj.weight": np.zeros(2, np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32),
    }
    with caplog.at_level(logging.INFO):
        validate_checkpoint(reader_of(tmp_path, tiny_tensors(spec) | extra), spec)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "ignoring 1 tensors of multi-token-prediction layers")
    ]


def test_unknown_tensors_are_counted_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = tiny_spec()
    extra = {"model.layers.0.odd": np.zeros(2, np.float32), "other": np.zeros(2, np.float32)}
    validate_checkpoint(reader_of(tmp_path, tiny_tensors(spec) | extra), spec)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "ignoring 2 unknown tensors" in caplog.text
