"""The published models' configs: what is read from them, with and without transformers."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

from deepseek_triton.build.pipeline import kv_cache_spec
from deepseek_triton.checkpoint.config import model_spec_from_config
from deepseek_triton.checkpoint.names import expected_tensors
from deepseek_triton.checkpoint.spec import (
    GroupedQueryAttentionSpec,
    LatentAttentionSpec,
    LinearSpec,
    Llama3Spec,
    ModelSpec,
)
from deepseek_triton.export.rope import attention_factor, inverse_frequencies
from tests.unit.checkpoint.published import PUBLISHED

# Bytes of KV cache a token takes in bf16, and billions of parameters as published.
SIZES = {
    "deepseek-llm-7b": (491_520, 6.9),
    "deepseek-llm-67b": (389_120, 67.4),
    "deepseek-math-7b": (491_520, 6.9),
    "deepseek-coder-1.3b": (196_608, 1.35),
    "deepseek-coder-6.7b": (524_288, 6.7),
    "deepseek-coder-33b": (253_952, 33.3),
    "DeepSeek-R1-Distill-Llama-8B": (131_072, 8.03),
    "DeepSeek-R1-Distill-Llama-70B": (327_680, 70.6),
    "DeepSeek-R1-Distill-Qwen-1.5B": (28_672, 1.78),
    "DeepSeek-R1-Distill-Qwen-7B": (57_344, 7.62),
    "DeepSeek-R1-Distill-Qwen-14B": (196_608, 14.8),
    "DeepSeek-R1-Distill-Qwen-32B": (262_144, 32.8),
    "deepseek-moe-16b": (229_376, 16.4),
    "DeepSeek-V2-Lite": (31_104, 15.7),
    "DeepSeek-V2": (69_120, 236),
    "DeepSeek-V3": (70_272, 671),
}


def spec_of(name: str) -> ModelSpec:
    return model_spec_from_config(copy.deepcopy(PUBLISHED[name]))


def grouped(name: str) -> tuple[ModelSpec, GroupedQueryAttentionSpec]:
    spec = spec_of(name)
    assert isinstance(spec.attention, GroupedQueryAttentionSpec)
    return spec, spec.attention


@pytest.mark.parametrize("name", PUBLISHED)
def test_cache_and_parameters_have_the_published_size(name: str) -> None:
    spec = spec_of(name)
    kv_bytes, billions = SIZES[name]
    cache = kv_cache_spec(spec, "bf16", 16, draft=False)
    assert cache.bytes_per_block == 16 * kv_bytes
    parameters = sum(math.prod(shape) for _, shape in expected_tensors(spec))
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_deepseek_llm_is_multi_head_in_7b_and_grouped_in_67b() -> None:
    spec, attention = grouped("deepseek-llm-7b")
    assert attention == GroupedQueryAttentionSpec(32, 32, 128, 128**-0.5, False, False)
    assert (spec.rope.dim, spec.rope.theta, spec.rope.scaling) == (128, 10000.0, None)
    assert not spec.rope.interleaved
    assert (spec.architecture, spec.moe, spec.moe_layers) == ("llama", None, ())
    _, attention = grouped("deepseek-llm-67b")
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (64, 8, 128)


@pytest.mark.parametrize("size", ["1.3b", "6.7b", "33b"])
def test_deepseek_coder_keeps_its_linear_factor(size: str) -> None:
    spec, _ = grouped(f"deepseek-coder-{size}")
    assert spec.rope.scaling == LinearSpec(4.0)
    assert spec.rope.theta == 100000.0
    assert spec.max_position_embeddings == 16384


@pytest.mark.parametrize("size", ["8B", "70B"])
def test_distilled_llama_has_its_rope_scaling(size: str) -> None:
    spec, attention = grouped(f"DeepSeek-R1-Distill-Llama-{size}")
    assert spec.rope.scaling == Llama3Spec(8.0, 1.0, 4.0, 8192)
    assert (attention.num_kv_heads, attention.qkv_bias, attention.o_bias) == (8, False, False)
    ends = {"8B": (128001,), "70B": (128001, 128008, 128009)}
    assert spec.eos_token_ids == ends[size]


@pytest.mark.parametrize("size", ["1.5B", "7B", "14B", "32B"])
def test_distilled_qwen_has_biases_on_queries_keys_and_values_alone(size: str) -> None:
    spec, attention = grouped(f"DeepSeek-R1-Distill-Qwen-{size}")
    assert (attention.qkv_bias, attention.o_bias, attention.head_dim) == (True, False, 128)
    assert not spec.tie_word_embeddings
    assert spec.rope.theta == (10000.0 if size in ("1.5B", "7B") else 1e6)


def test_deepseek_moe_joins_multi_head_attention_and_softmax_experts() -> None:
    spec, attention = grouped("deepseek-moe-16b")
    assert attention.num_kv_heads == attention.num_heads == 16
    assert spec.moe is not None
    assert spec.moe_layers == tuple(range(1, 28))
    assert (spec.moe.expert_intermediate_size, spec.moe.shared_intermediate_size) == (1408, 2816)
    routing = spec.moe.routing
    assert (routing.kind, routing.num_experts, routing.top_k) == ("softmax", 64, 6)
    assert (routing.num_groups, routing.scaling_factor, routing.normalize) == (1, 1.0, False)


def test_the_prediction_layer_of_v3_is_not_one_of_its_layers() -> None:
    spec = spec_of("DeepSeek-V3")
    assert spec.num_layers == 61
    assert not any(name.startswith("model.layers.61.") for name, _ in expected_tensors(spec))


def reference_config(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    config = copy.deepcopy(PUBLISHED[name])
    config.pop("quantization_config", None)
    return transformers.AutoConfig.for_model(config.pop("model_type"), **config)


@pytest.mark.parity
@pytest.mark.parametrize("name", sorted({*PUBLISHED} - {"deepseek-moe-16b"}))
def test_rotary_frequencies_equal_transformers(name: str) -> None:
    pytest.importorskip("torch")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    spec, config = spec_of(name), reference_config(name)
    latent = isinstance(spec.attention, LatentAttentionSpec)
    if latent:
        config.head_dim = spec.rope.dim
    rotary = (DeepseekV3RotaryEmbedding if latent else LlamaRotaryEmbedding)(config)
    ours = inverse_frequencies(spec.rope)
    ours = ours[::2] if spec.rope.interleaved else ours[: spec.rope.dim // 2]
    np.testing.assert_allclose(ours, rotary.inv_freq.numpy(), rtol=1e-6)
    assert attention_factor(spec.rope) == pytest.approx(rotary.attention_scaling)


@pytest.mark.parity
@pytest.mark.parametrize(
    "name",
    ["deepseek-llm-7b", "DeepSeek-R1-Distill-Qwen-1.5B", "DeepSeek-R1-Distill-Llama-8B"],
)
def test_names_and_shapes_equal_transformers(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(reference_config(name))
    theirs = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert dict(expected_tensors(spec_of(name))) == theirs
