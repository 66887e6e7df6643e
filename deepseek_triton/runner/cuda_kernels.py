"""The operators of a fused program on a GPU: what each call becomes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepseek_triton.kernels.experts import experts
from deepseek_triton.kernels.int4_one_token import linear_int4_one
from deepseek_triton.kernels.int4_tensor import Int4Tensor
from deepseek_triton.kernels.linear import SMALL_ROWS, linear
from deepseek_triton.kernels.linear_int4 import linear_int4
from deepseek_triton.kernels.rms_norm import rms_norm
from deepseek_triton.kernels.routing import Routing, route, router
from deepseek_triton.kernels.swiglu import swiglu
from deepseek_triton.runner.cuda_attention import grouped_query_attention, latent_attention
from deepseek_triton.runner.cuda_program import Call
from deepseek_triton.runner.cuda_reference import REFERENCE, Operator, Value
from deepseek_triton.runner.cuda_step import Step

_MANY_FEATURES = 16384  # from here on our kernel beats cuBLAS also for several rows


def fused_linear(_step: Step, call: Call, inputs: Sequence[Value]) -> Tensor:
    """cuda.Linear: one kernel for few rows, cuBLAS beyond."""
    x, weight, bias, norm, residual = inputs
    epsilon, gated = call.attributes["epsilon"], call.attributes["swiglu"]
    if isinstance(weight, Int4Tensor):
        return _linear_int4(call, inputs)
    if len(x) == 1:
        return linear(
            x, weight, bias, norm_weight=norm, eps=epsilon, residual=residual, swiglu=gated
        )
    if norm is not None:
        x = rms_norm(x, norm, epsilon)
    if len(x) <= SMALL_ROWS and len(weight) >= _MANY_FEATURES and not gated:
        return linear(x, weight, bias, residual=residual)
    if gated:
        y = swiglu(torch.nn.functional.linear(x, weight, bias))
        return y if residual is None else residual + y
    if residual is not None:
        y = torch.addmm(residual, x, weight.T)
        return y if bias is None else y + bias
    return torch.nn.functional.linear(x, weight, bias)


def _linear_int4(call: Call, inputs: Sequence[Value]) -> Tensor:
    x, weight, bias, norm, residual = inputs
    if norm is not None:
        x = rms_norm(x, norm, call.attributes["epsilon"])
    product = linear_int4_one if len(x) == 1 else linear_int4
    if not call.attributes["swiglu"]:
        return product(x, weight, bias, residual=residual)
    y = swiglu(product(x, weight, bias))
    return y if residual is None else residual + y


def routing_of(call: Call, num_experts: int) -> Routing:
    """How a cuda.MoE call chooses its experts."""
    grouped = call.attributes["route"].endswith("Grouped")
    return Routing(
        kind="sigmoid" if "Sigmoid" in call.attributes["route"] else "softmax",
        num_experts=num_experts,
        top_k=call.number("top_k"),
        scaling_factor=call.attributes["scaling_factor"],
        normalize=bool(call.attributes.get("normalize", 0.0)),
        num_groups=call.number("num_groups") if grouped else 1,
        top_groups=call.number("top_groups") if grouped else 1,
        num_shared=call.attributes["num_shared"],
    )


def fused_moe(_step: Step, call: Call, inputs: Sequence[Value]) -> Tensor:
    """cuda.MoE: norm and router, choice, both products of the chosen and the shared experts."""
    x, norm, router_weight, bias, gate_up, down, *shared = inputs
    normed, logits = router(x, router_weight, norm, call.attributes["epsilon"])
    ids, weights = route(logits, routing_of(call, len(router_weight)), bias)
    if shared:
        x = _shared_expert(normed, shared[0], shared[1], x)
    return experts(normed, ids, weights, gate_up, down, residual=x)


def _shared_expert(x: Tensor, gate_up: Value, down: Value, residual: Tensor) -> Tensor:
    if isinstance(gate_up, Int4Tensor):
        product = linear_int4_one if len(x) == 1 else linear_int4
        return product(swiglu(product(x, gate_up)), down, residual=residual)
    return linear(linear(x, gate_up, swiglu=True), down, residual=residual)


KERNELS: dict[str, Operator] = {
    **REFERENCE,
    "cuda.Linear": fused_linear,
    "cuda.LinearInt4": fused_linear,
    "cuda.MoE": fused_moe,
    "cuda.MoEInt4": fused_moe,
    "deepseek.GroupedQueryAttention": grouped_query_attention,
    "deepseek.LatentAttention": latent_attention,
}
