from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from deepseek_triton.checkpoint.config import model_spec_from_config, read_model_spec
from deepseek_triton.checkpoint.names import expected_tensors
from deepseek_triton.checkpoint.presets import PRESETS, preset_config
from deepseek_triton.checkpoint.spec import YarnSpec
from deepseek_triton.errors import CheckpointError, ConfigError, UnsupportedModelError

V2_MINIMAL = {"model_type": "deepseek_v2", "num_experts_per_tok": 6}
V3_MINIMAL = {"model_type": "deepseek_v3"}

# The published shapes, with the keys that decide something.
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_the_published_v2_lite_config_is_read(tmp_path: Path) -> None:
    spec = read_model_spec(write(tmp_path, V2_LITE))
    assert spec.architecture == "deepseek_v2"
    assert spec.moe_layers == tuple(range(1, 27))
    assert spec.attention.q_lora_rank is None
    assert spec.attention.latent_width == 576
    mscale = 0.1 * 0.707 * math.log(40) + 1
    assert spec.attention.softmax_scale == pytest.approx(mscale**2 / math.sqrt(192))
    assert spec.rope.interleaved
    assert spec.rope.yarn == YarnSpec(40.0, 4096, 32.0, 1.0, 0.707, 0.707, True)
    assert spec.moe is not None
    assert spec.moe.shared_intermediate_size == 2816
    assert (spec.moe.routing.kind, spec.moe.routing.num_groups) == ("softmax", 1)
    assert not spec.moe.routing.normalize
    assert (spec.bos_token_id, spec.eos_token_ids) == (100000, (100001,))


def test_a_bare_v3_config_takes_the_published_defaults() -> None:
    spec = model_spec_from_config(V3_MINIMAL)
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (61, 7168, 129280)
    assert spec.attention.q_lora_rank == 1536
    assert spec.attention.softmax_scale == 192**-0.5
    assert spec.moe is not None
    routing = spec.moe.routing
    assert (routing.kind, routing.num_experts, routing.top_k) == ("sigmoid", 256, 8)
    assert (routing.num_groups, routing.top_groups, routing.normalize) == (8, 4, True)
    assert (spec.bos_token_id, spec.eos_token_ids) == (0, (1,))


def test_old_and_new_rope_spellings_mean_the_same() -> None:
    new = {k: v for k, v in V2_LITE.items() if k not in ("rope_scaling", "rope_theta")}
    old_rope = dict(V2_LITE["rope_scaling"])  # type: ignore[call-overload]
    rope_type = old_rope.pop("type")
    new["rope_parameters"] = {**old_rope, "rope_type": rope_type, "rope_theta": 10000.0}
    assert model_spec_from_config(new) == model_spec_from_config(V2_LITE)


def test_the_theta_inside_rope_parameters_wins() -> None:
    config = V3_MINIMAL | {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 5e5}}
    assert model_spec_from_config(config).rope.theta == 5e5
    assert model_spec_from_config(V3_MINIMAL | {"rope_theta": 7.0}).rope.theta == 7.0


def test_softmax_scale_ignores_yarn_without_mscale_all_dim() -> None:
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0}
    spec = model_spec_from_config(V3_MINIMAL | {"rope_scaling": yarn})
    assert spec.attention.softmax_scale == 192**-0.5
    assert spec.rope.yarn is not None
    assert spec.rope.yarn.original_max_position_embeddings == spec.max_position_embeddings


def test_v3_rope_may_be_in_halves() -> None:
    assert model_spec_from_config(V3_MINIMAL).rope.interleaved
    assert not model_spec_from_config(V3_MINIMAL | {"rope_interleave": False}).rope.interleaved


def test_group_limited_routing_needs_its_groups() -> None:
    grouped = V2_MINIMAL | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    moe = model_spec_from_config(grouped).moe
    assert moe is not None
    assert (moe.routing.num_groups, moe.routing.top_groups) == (8, 3)
    with pytest.raises(CheckpointError, match=r"topk_group is missing: group_limited_greedy"):
        model_spec_from_config({k: v for k, v in grouped.items() if k != "topk_group"})


def test_a_model_without_expert_layers_has_no_moe() -> None:
    spec = model_spec_from_config(
        {"model_type": "deepseek_v2", "first_k_dense_replace": 4, "num_hidden_layers": 4}
    )
    assert spec.moe is None
    assert spec.moe_layers == ()


def test_generation_config_decides_the_end_ids(tmp_path: Path) -> None:
    folder = write(tmp_path, V3_MINIMAL, {"eos_token_id": [5, 7, 5]})
    assert read_model_spec(folder).eos_token_ids == (5, 7)
    assert read_model_spec(folder).bos_token_id == 0


@pytest.mark.parametrize("value", [10**9, "</s>"])
def test_an_end_id_that_generation_config_overrules_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: object
) -> None:
    folder = write(tmp_path, V3_MINIMAL | {"eos_token_id": value}, {"eos_token_id": 5})
    assert read_model_spec(folder).eos_token_ids == (5,)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "config.json: eos_token_id" in caplog.text
    assert "generation_config.json decides" in caplog.text


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_a_dtype_that_no_weights_have_is_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture, key: str
) -> None:
    model_spec_from_config(V3_MINIMAL | {key: "bfloat16"})
    assert caplog.records == []
    model_spec_from_config(V3_MINIMAL | {key: "float8"})
    assert f'{key} "float8" is ignored' in caplog.text


def test_a_null_end_id_means_none() -> None:
    assert model_spec_from_config(V3_MINIMAL | {"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v32"}, "sparse attention"),
        ({"model_type": "deepseek_v4"}, "hyper-connections"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "each head's queries"),
        ({"model_type": "mamba"}, "supported are deepseek "),
        ({"architectures": ["DeepseekV3ForSequenceClassification"]}, "SequenceClassification"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"mlp_bias": True}, "mlp_bias true"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, 'it must be "noaux_tc"'),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, '"linear" is not supported'),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, '"dynamic" is not supported'),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.0}},
            "attention_factor",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        model_spec_from_config(V3_MINIMAL | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "7168"}, r'hidden_size must be an integer, found "7168"'),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"hidden_size": None}, "hidden_size must be an integer, found null"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, found 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be finite"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be above 0"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"rope_theta": "1e4"}, "rope_theta must be a number"),
        ({"rope_scaling": [4]}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": {"type": 3}}, "type must be a string"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even"),
        ({"num_key_value_heads": 8}, "num_key_value_heads must equal"),
        ({"n_group": 7}, "n_group 7 does not divide 256"),
        ({"topk_group": 9}, "topk_group 9 is more than n_group 8"),
        ({"num_experts_per_tok": 200}, "200 is more than the 128 experts"),
        ({"n_group": 256, "topk_group": 8}, "two experts a group"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id must hold token ids"),
        ({"eos_token_id": 129280}, "eos_token_id 129280 is outside the vocabulary of 129280"),
        ({"eos_token_id": "</s>"}, "eos_token_id must hold token ids"),
        ({"architectures": "DeepseekV3ForCausalLM"}, "architectures must be a list"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 4096, found 1000000000"),
        ({"n_routed_experts": 10**9}, "n_routed_experts must be at most 65536"),
        ({"hidden_size": 2**24 + 1}, "hidden_size must be at most 16777216"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings must be at most 16777216"),
        ({"q_lora_rank": 10**9}, "q_lora_rank must be at most 16777216"),
    ],
)
def test_a_bad_value_is_refused_with_file_and_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        model_spec_from_config(V3_MINIMAL | changes, where="some/config.json")
    assert str(caught.value).startswith("some/config.json")


def test_v2_must_say_how_many_experts_a_token_takes() -> None:
    with pytest.raises(CheckpointError, match="num_experts_per_tok is missing"):
        model_spec_from_config({"model_type": "deepseek_v2"})


def test_a_folder_that_does_not_exist_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: the folder does not exist"):
        read_model_spec(tmp_path / "nowhere")


def test_a_folder_without_config_says_what_a_checkpoint_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not found; a checkpoint is a folder"):
        read_model_spec(tmp_path)


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
QWEN2 = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2}
MOE = LLAMA | {
    "model_type": "deepseek",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **values}}


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LLAMA, rope("dynamic", factor=2.0), 'rope type "dynamic" is not supported for llama'),
        (LLAMA, rope("longrope", factor=2.0), '"longrope" .* supported are "default", "linear"'),
        (LLAMA, {"mlp_bias": True}, "mlp_bias true"),
        (LLAMA, {"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window true .* must be false"),
        (QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (QWEN2, {"use_mrope": True}, "use_mrope true"),
        (MOE, {"norm_topk_prob": True}, "norm_topk_prob true"),
        (MOE, {"topk_method": "group_limited_greedy"}, 'it must be "greedy"'),
        (MOE, {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        (MOE, {"kv_lora_rank": 512}, 'set model_type to "deepseek_v2"'),
        (MOE, rope("yarn", factor=2.0), '"yarn" is not supported for deepseek;'),
    ],
)
def test_what_other_families_lack_is_refused_by_name(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    model_spec_from_config(config | {"eos_token_id": 1, "bos_token_id": 0})
    with pytest.raises(UnsupportedModelError, match=message):
        model_spec_from_config(config | changes)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide the 4"),
        (LLAMA, {"hidden_size": 66}, "head_dim is missing, and num_attention_heads 4 does not"),
        (LLAMA, {"head_dim": 15}, "head_dim must be even, found 15"),
        (LLAMA, {"hidden_size": 60}, "head_dim must be even, found 15"),
        (LLAMA, {"head_dim": 0}, "head_dim must be at least 1"),
        (LLAMA, rope("linear"), 'factor is missing: rope type "linear" needs it'),
        (LLAMA, rope("linear", factor=0), "factor must be above 0"),
        (LLAMA, rope("llama3", factor=8.0), "low_freq_factor is missing"),
        (
            LLAMA,
            rope(
                "llama3",
                factor=8.0,
                low_freq_factor=4.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
            "high_freq_factor 4.0 must be above low_freq_factor 4.0",
        ),
        (MOE, {"n_routed_experts": None}, "n_routed_experts is missing"),
        (MOE, {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
    ],
)
def test_bad_values_of_other_families_are_named(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        model_spec_from_config(config | changes)


def test_absent_kv_heads_mean_as_many_as_attention_heads() -> None:
    attention = model_spec_from_config(LLAMA).attention
    assert (attention.num_kv_heads, attention.pool_width) == (4, 64)


def test_biases_are_where_the_family_has_them() -> None:
    plain, biased, qwen2 = (
        {
            name.split("self_attn.")[1].removesuffix(".bias")
            for name, _ in expected_tensors(model_spec_from_config(config))
            if name.endswith(".bias") and "layers.0." in name
        }
        for config in (LLAMA, LLAMA | {"attention_bias": True}, QWEN2)
    )
    assert plain == set()
    assert biased == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert qwen2 == {"q_proj", "k_proj", "v_proj"}


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b""])
def test_a_config_that_is_not_a_json_object_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_supported(name: str) -> None:
    spec = model_spec_from_config(preset_config(name))
    assert (spec.moe is None) == (spec.architecture in ("llama", "qwen2"))
    assert spec.moe_layers == ((1, 2, 3) if spec.moe else ())


def test_presets_differ_where_the_architectures_do() -> None:
    lite, v2, v3 = (model_spec_from_config(preset_config(name)) for name in ("v2-lite", "v2", "v3"))
    assert lite.attention.q_lora_rank is None
    assert v2.attention.q_lora_rank is not None
    assert v2.rope.yarn is not None
    assert v2.moe is not None
    assert v2.moe.routing.num_groups > 1
    assert v3.moe is not None
    assert v3.moe.routing.kind == "sigmoid"


def test_an_unknown_preset_lists_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="v2-lite, v2, v3"):
        preset_config("v9")


@pytest.mark.parity
@pytest.mark.parametrize("minimal", [V2_MINIMAL, V3_MINIMAL])
def test_defaults_and_softmax_scale_equal_transformers(minimal: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    kind = transformers.DeepseekV2Config if "v2" in minimal["model_type"] else None
    kind = kind or transformers.DeepseekV3Config
    reference = kind(num_experts_per_tok=minimal.get("num_experts_per_tok", 8)).to_dict()
    complete = model_spec_from_config(reference)
    assert model_spec_from_config(minimal) == complete
