"""TensorRT-LLM checkpoints: the model's own weights come back from all ranks together."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from safetensors.numpy import load_file

from deepseek_triton.build.engine_dir import load_engine_dir
from deepseek_triton.build.limits import CallLimits
from deepseek_triton.build.parallel import Parallel
from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.build.tensorrt_llm import write_checkpoint
from deepseek_triton.build.trtllm_scripts import template_values
from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.errors import ConfigError

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
LIMITS = CallLimits(max_batch_size=8, max_context_len=1024)
# 4,097 rows do not divide: lm_head is padded.
CHANGES = {"rope_scaling": YARN, "first_k_dense_replace": 1, "vocab_size": 4097}
Tensors = dict[str, NDArray[Any]]


def convert(
    folder: Path, arch: str, parallel: Parallel, **changes: Any
) -> tuple[Tensors, list[Tensors], dict[str, Any]]:
    """Return the checkpoint's tensors, each rank's, and config.json."""
    config = {**preset_config(arch), **CHANGES, **changes}
    write_random_checkpoint(folder / "hf", config)
    spec, reader = read_model_spec(folder / "hf"), CheckpointReader(folder / "hf")
    out = folder / "out"
    out.mkdir()
    write_checkpoint(spec, reader, folder / "hf", out, "fp16", limits=LIMITS, parallel=parallel)
    ranks = [load_file(out / f"rank{rank}.safetensors") for rank in range(parallel.world_size)]
    original = {name: reader.read(name) for name in reader.names()}
    return original, ranks, json.loads((out / "config.json").read_text())


def same(found: NDArray[Any], expected: NDArray[Any]) -> None:
    np.testing.assert_array_equal(found, expected.astype(np.float16))


@pytest.mark.parametrize("arch", ["v2-lite", "v2", "v3"])
@pytest.mark.parametrize("parallel", [Parallel(), Parallel(tp=2), Parallel(tp=4, ep=2, pp=2)])
def test_attention_comes_back_from_the_ranks(tmp_path: Path, arch: str, parallel: Parallel) -> None:
    original, ranks, config = convert(tmp_path, arch, parallel)
    heads, nope, rope, value, rank = (
        config[key]
        for key in (
            "num_attention_heads",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "kv_lora_rank",
        )
    )
    layers = config["num_hidden_layers"]
    for layer in range(layers):
        stage = next(s for s in range(parallel.pp) if layer in parallel.layers(s, layers))
        local = layer - parallel.layers(stage, layers)[0]
        name, source = f"transformer.layers.{local}.", f"model.layers.{layer}."
        own = ranks[stage * parallel.tp : (stage + 1) * parallel.tp]
        attention = source + "self_attn."
        q_name = "q_proj.weight" if config["q_lora_rank"] is None else "q_b_proj.weight"
        q = original[attention + q_name].reshape(heads, nope + rope, -1)
        kv_b = original[attention + "kv_b_proj.weight"].reshape(heads, nope + value, rank)
        a = [original[attention + "kv_a_proj_with_mqa.weight"]]
        if config["q_lora_rank"] is not None:
            a.insert(0, original[attention + "q_a_proj.weight"])
            same(
                own[0][name + "attention.q_a_layernorm.weight"],
                original[attention + "q_a_layernorm.weight"],
            )
        each = heads // parallel.tp
        for r, tensors in enumerate(own):
            mine = slice(r * each, (r + 1) * each)
            same(tensors[name + "attention.fused_a.weight"], np.concatenate(a))
            same(tensors[name + "attention.q_b_proj"], q[mine].reshape(each * (nope + rope), -1))
            k_then_v = [kv_b[mine, :nope].reshape(-1, rank), kv_b[mine, nope:].reshape(-1, rank)]
            same(tensors[name + "attention.kv_b_proj"], np.concatenate(k_then_v))
            # The scores of any hidden state are those of the two factors.
            fused = tensors[name + "attention.fused_q_proj"].reshape(each, rank + rope, -1)
            product = np.einsum("hdq,hdk->hkq", q[mine, :nope], kv_b[mine, :nope])
            np.testing.assert_allclose(fused[:, :rank], product, atol=2e-3)
            same(fused[:, rank:], q[mine, nope:])
        dense = np.concatenate([t[name + "attention.dense.weight"] for t in own], axis=1)
        same(dense, original[attention + "o_proj.weight"])
        same(own[-1][name + "input_layernorm.weight"], original[source + "input_layernorm.weight"])
        same(
            own[-1][name + "post_layernorm.weight"],
            original[source + "post_attention_layernorm.weight"],
        )


@pytest.mark.parametrize("arch", ["v2-lite", "v3"])
@pytest.mark.parametrize(
    "parallel", [Parallel(), Parallel(tp=2), Parallel(tp=2, ep=2), Parallel(tp=4, ep=2)]
)
def test_experts_and_mlps_come_back_from_the_ranks(
    tmp_path: Path, arch: str, parallel: Parallel
) -> None:
    original, ranks, config = convert(tmp_path, arch, parallel)
    count = config["moe"]["num_experts"]
    for layer in range(1, config["num_hidden_layers"]):
        name, source = f"transformer.layers.{layer}.mlp.", f"model.layers.{layer}.mlp."
        moe_tp = parallel.tp // parallel.ep
        for expert in range(count):
            group = expert // (count // parallel.ep)
            place = expert % (count // parallel.ep)
            holders = [ranks[part * parallel.ep + group] for part in range(moe_tp)]
            halves = [np.split(t[name + "fc.weight"][place], 2) for t in holders]
            theirs = f"{source}experts.{expert}."
            same(np.concatenate([up for up, _ in halves]), original[theirs + "up_proj.weight"])
            same(
                np.concatenate([gate for _, gate in halves]), original[theirs + "gate_proj.weight"]
            )
            down = np.concatenate([t[name + "proj.weight"][place] for t in holders], axis=1)
            same(down, original[theirs + "down_proj.weight"])
        halves = [np.split(t[name + "shared_expert.fc.weight"], 2) for t in ranks]
        shared = source + "shared_experts."
        same(np.concatenate([up for up, _ in halves]), original[shared + "up_proj.weight"])
        same(np.concatenate([gate for _, gate in halves]), original[shared + "gate_proj.weight"])
        down = np.concatenate([t[name + "shared_expert.proj.weight"] for t in ranks], axis=1)
        same(down, original[shared + "down_proj.weight"])
        for tensors in ranks:
            assert tensors[name + "router.weight"].dtype == np.float32
            np.testing.assert_array_equal(
                tensors[name + "router.weight"], original[source + "gate.weight"]
            )
            if arch == "v3":
                np.testing.assert_array_equal(
                    tensors[name + "e_score_correction_bias"],
                    original[source + "gate.e_score_correction_bias"],
                )
    name, source = "transformer.layers.0.mlp.", "model.layers.0.mlp."
    for ours, theirs, axis in (("fc", "gate", 0), ("gate", "up", 0), ("proj", "down", 1)):
        whole = np.concatenate([t[f"{name}{ours}.weight"] for t in ranks], axis=axis)
        same(whole, original[f"{source}{theirs}_proj.weight"])


def test_the_engine_directory_is_its_checkpoint_with_scripts(tmp_path: Path) -> None:
    config = {**preset_config("v2-lite"), **CHANGES}
    write_random_checkpoint(tmp_path / "it's hf", config)
    manifest = build_engine(
        tmp_path / "it's hf",
        tmp_path / "engine",
        target="tensorrt_llm",
        precision="bf16",
        limits=LIMITS,
        parallel=Parallel(tp=2),
    )
    assert manifest.target == "tensorrt_llm"
    names = {entry.name for entry in load_engine_dir(tmp_path / "engine").manifest.files}
    assert names >= {"config.json", "rank0.safetensors", "rank1.safetensors", "tokenizer.json"}
    for script in ("build.sh", "serve.sh"):
        path = tmp_path / "engine" / script
        assert os.access(path, os.X_OK)
        subprocess.run(["bash", "-n", path], check=True)
    build = (tmp_path / "engine" / "build.sh").read_text()
    for option in ("--max_batch_size 8", "--max_seq_len 1024", "--gemm_plugin bfloat16"):
        assert option in build
    llm_api = yaml.safe_load((tmp_path / "engine" / "model.yaml").read_text())
    assert llm_api["model"] == str(tmp_path / "it's hf")
    assert llm_api["tensor_parallel_size"] == 2
    assert llm_api["triton_config"] == {"max_batch_size": 0, "decoupled": True}


def test_serve_fills_every_name_that_the_templates_must_have(tmp_path: Path) -> None:
    """The names without which triton_backend's models of release 1.2 do not start."""
    values = template_values(LIMITS)
    assert values["tensorrt_llm"].keys() >= {
        "triton_backend",
        "triton_max_batch_size",
        "decoupled_mode",
        "engine_dir",
        "batching_strategy",
        "max_queue_delay_microseconds",
        "encoder_input_features_data_type",
        "logits_datatype",
    }
    assert values["preprocessing"].keys() == {
        "tokenizer_dir",
        "triton_max_batch_size",
        "preprocessing_instance_count",
    }


def test_other_targets_refuse_ranks_and_this_one_refuses_drafts(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "hf", preset_config("v2-lite"))
    with pytest.raises(ConfigError, match="TP, PP, EP: onnxruntime runs on one device"):
        build_engine(tmp_path / "hf", tmp_path / "engine", parallel=Parallel(tp=2))
    with pytest.raises(ConfigError, match="DRAFT: tensorrt_llm cannot"):
        build_engine(
            tmp_path / "hf",
            tmp_path / "engine",
            target="tensorrt_llm",
            precision="fp16",
            draft=True,
        )
    with pytest.raises(ConfigError, match="PRECISION: 'fp32' is not available for tensorrt_llm"):
        build_engine(tmp_path / "hf", tmp_path / "engine", target="tensorrt_llm")


def test_embedding_and_head_are_at_the_ends(tmp_path: Path) -> None:
    original, ranks, config = convert(tmp_path, "v2-lite", Parallel(tp=2, pp=2))
    head = np.concatenate([ranks[2]["lm_head.weight"], ranks[3]["lm_head.weight"]])
    same(head[: config["vocab_size"]], original["lm_head.weight"])
    assert len(head) == config["vocab_size"] + 1
    assert not head[-1].any()
    same(ranks[3]["transformer.ln_f.weight"], original["model.norm.weight"])
    for tensors in ranks[:2]:
        same(tensors["transformer.vocab_embedding.weight"], original["model.embed_tokens.weight"])
        assert "lm_head.weight" not in tensors
    assert "transformer.vocab_embedding.weight" not in ranks[2]


def test_the_config_states_what_tensorrt_llm_asks_for(tmp_path: Path) -> None:
    _, _, config = convert(tmp_path, "v3", Parallel(tp=4, ep=2))
    assert config["architecture"] == "DeepseekV3ForCausalLM"
    assert config["dtype"] == "float16"
    assert config["head_size"] == config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert config["num_key_value_heads"] == 1
    assert config["mapping"] == {
        "world_size": 4,
        "tp_size": 4,
        "pp_size": 1,
        "moe_tp_size": 2,
        "moe_ep_size": 2,
    }
    assert config["moe"]["topk_method"] == 2
    assert config["moe"]["normalization_mode"] == 3
    assert config["rotary_scaling"] == {"type": "yarn", **{k: v for k, v in YARN.items()}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": None}, "needs YaRN"),
        ({"first_k_dense_replace": 2}, "experts in every layer but the first"),
        ({"routed_scaling_factor": 2.0}, "no scaling factor"),
    ],
)
def test_models_that_it_cannot_run_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path, "v2-lite", Parallel(), **changes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "TP: 0"),
        ({"tp": 4, "ep": 3}, "EP: 3 does not divide TP 4"),
        ({"tp": 3}, "TP: 3 does not divide the model's 4 attention heads"),
        ({"pp": 5}, "PP: 5 is more than the model's 4 layers"),
    ],
)
def test_ranks_that_do_not_fit_are_named(
    tmp_path: Path, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path, "v2-lite", Parallel(**sizes))
