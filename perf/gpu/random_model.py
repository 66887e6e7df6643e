"""Models of a real shape with random weights, made on the device: no checkpoint, no files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deepseek_triton.checkpoint.config import model_spec_from_config
from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.export.graph import GraphBuilder
from deepseek_triton.export.portable import WEIGHTS_FILE, write_graph
from deepseek_triton.export.precision import find_precision
from deepseek_triton.runner.cuda_program import (
    Call,
    FoldedTensor,
    Program,
    StoredTensor,
    numpy_dtype,
    program_of,
)

V2_LITE: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "deepseek_v2_lite.json").read_text(encoding="utf-8")
)

V3_LAYER: dict[str, Any] = {
    **V2_LITE,
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "rope_interleave": True,
    "rope_scaling": {**V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
    "num_nextn_predict_layers": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_GROUPED_QUERY: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_hidden_layers": 28,
}

DISTILL_LLAMA_8B: dict[str, Any] = {
    **_GROUPED_QUERY,
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}

DISTILL_QWEN_7B: dict[str, Any] = {
    **_GROUPED_QUERY,
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "use_sliding_window": False,
}

MOE_16B: dict[str, Any] = {
    **_GROUPED_QUERY,
    "model_type": "deepseek",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    **{key: V2_LITE[key] for key in V2_LITE if "expert" in key or "moe" in key},
    "first_k_dense_replace": 1,
    "scoring_func": "softmax",
    "norm_topk_prob": False,
}


class Shapes:
    """A checkpoint of ones that take no memory: what export needs to lay a graph out."""

    def require(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return ones of `shape`."""
        return np.broadcast_to(np.float32(1), shape)

    def blocks(self, name: str, shape: tuple[int, ...]) -> Iterator[NDArray[Any]]:
        """Yield what `require` returns, as one block."""
        yield self.require(name, shape)

    def int4(self, source: str) -> None:
        """No layer is INT4."""

    def release(self) -> None:
        """Nothing is held."""


def make_spec(config: dict[str, Any], **changes: Any) -> ModelSpec:
    """Return the spec of a config with some keys changed."""
    return model_spec_from_config({**config, **changes})


def make_program(spec: ModelSpec, precision: str, block_size: int) -> Program:
    """Return the program of the portable model of `spec`; its weights file does not exist."""
    graph = GraphBuilder(find_precision(precision))
    write_graph(graph, spec, Shapes(), block_size)
    return program_of(graph.model(spec.architecture, WEIGHTS_FILE), Path("model.onnx"))


def quantized(program: Program, group_size: int) -> Program:
    """Return the program with INT4 layers and experts, symmetric; the head stays as it is."""
    tensors = dict(program.tensors)

    def split(name: str) -> tuple[str, str, str]:
        weight = program.tensors[name]
        assert isinstance(weight, StoredTensor)
        *rows, columns = weight.shape
        groups = (*rows, -(-columns // group_size))
        codes, scales, zeros = (f"{name}.{part}" for part in ("codes", "scales", "zero_points"))
        tensors[codes] = replace(weight, name=codes, onnx_type=21, value=None)
        tensors[scales] = replace(weight, name=scales, shape=groups, value=None)
        tensors[zeros] = replace(weight, name=zeros, shape=groups, onnx_type=21, value=None)
        return codes, scales, zeros

    calls = []
    extra = {"group_size": [group_size], "symmetric": [1]}
    for call in program.calls:
        plain = call.op == "deepseek.Linear" and "router" not in call.inputs[1]
        if plain and call.inputs[1] != "lm_head.weight":
            inputs = (call.inputs[0], *split(call.inputs[1]))
            call = Call("deepseek.LinearInt4", inputs, call.outputs, {**call.attributes, **extra})
        elif call.op == "deepseek.Experts":
            inputs = (*call.inputs[:3], *split(call.inputs[3]), *split(call.inputs[4]))
            call = Call("deepseek.ExpertsInt4", inputs, call.outputs, {**call.attributes, **extra})
        calls.append(call)
    return replace(program, tensors=tensors).with_calls(calls)


def random_weights(program: Program, device: torch.device, seed: int = 0) -> dict[str, Any]:
    """Return random tensors on `device` in the place of load_weights: decisive, stable in depth."""
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: _random(name, tensor, device, generator) for name, tensor in program.tensors.items()
    }


def _random(
    name: str,
    tensor: StoredTensor | FoldedTensor,
    device: torch.device,
    generator: torch.Generator,
) -> Any:
    if isinstance(tensor, FoldedTensor):
        routed, shared = tensor.routed.shape, tensor.shared.shape
        times = shared[0] // routed[1] if tensor.by_rows else shared[1] // routed[2]
        whole = replace(tensor.routed, shape=(routed[0] + times, *routed[1:]))
        return _random(name, whole, device, generator)
    if tensor.onnx_type == 7:  # int64: sizes, which stay on the host
        return tensor.value
    if name == "rotary.turn":  # the kernels know how pairs lie
        return None
    if name.startswith("rotary"):
        return torch.from_numpy(np.array(tensor.value, np.float32)).to(device)
    shape, columns = tensor.shape, tensor.shape[-1]
    if tensor.onnx_type == 21:
        size = (*shape[:-1], columns // 2)
        low, high = (  # 1 … 15: around the zero point, so that rows do not all become alike
            torch.randint(1, 16, size, dtype=torch.uint8, device=device, generator=generator)
            for _ in range(2)
        )
        return low | high << 4
    dtype = getattr(torch, numpy_dtype(tensor.onnx_type).name)
    values = torch.empty(shape, dtype=dtype, device=device)
    if "norm" in name:
        return values.uniform_(0.5, 1.5, generator=generator)
    if "scales" in name:
        return values.uniform_(0.5, 1.5, generator=generator).mul_(0.2 / (columns * 128) ** 0.5)
    spread = 1.0 if "embedding" in name or name.endswith("bias") else columns**-0.5
    return values.normal_(0, spread, generator=generator)
