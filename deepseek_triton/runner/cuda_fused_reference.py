"""The fused calls of cuda_fusion.py in plain PyTorch, out of the operators that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deepseek_triton.runner.cuda_program import Call
from deepseek_triton.runner.cuda_reference import (
    REFERENCE,
    Operator,
    Value,
    experts,
    experts_int4,
    linear_int4,
    rms_norm_of,
    route,
    swiglu,
)
from deepseek_triton.runner.cuda_step import Step


def fused_linear(step: Step, call: Call, inputs: Sequence[Value]) -> Tensor:
    """Norm, product, bias, gate, residual: those of them that are there."""
    x, *weight, bias, norm, residual = inputs
    if norm is not None:
        x = rms_norm_of(x, norm, call.attributes["epsilon"])
    y = _product(step, call, x, weight)
    if bias is not None:
        y = y + bias
    if call.attributes["swiglu"]:
        y = swiglu(step, call, [y])
    return y if residual is None else residual + y


def fused_moe(step: Step, call: Call, inputs: Sequence[Value]) -> Tensor:
    """A whole block: x + experts(norm(x)) + shared expert(norm(x))."""
    x, norm, router, bias, *weights = inputs
    normed = rms_norm_of(x, norm, call.attributes["epsilon"])
    logits = normed.float() @ router.T
    routing = replace(call, op=call.attributes["route"])
    ids, chosen = route(step, routing, [logits] if bias is None else [logits, bias])
    count = 2 if call.op == "cuda.MoE" else 6
    if always := call.attributes.get("num_shared", 0):
        more = torch.arange(len(router), len(router) + always, device=x.device)
        ids = torch.cat((ids, more.expand(len(x), -1)), dim=1)
        chosen = torch.cat((chosen, torch.ones_like(chosen[:, :1]).expand(-1, always)), dim=1)
    run = experts if call.op == "cuda.MoE" else experts_int4
    y = run(step, call, [normed, ids, chosen, *weights[:count]])
    shared = weights[count:]
    if shared:
        half = len(shared) // 2
        gate_up = _product(step, call, normed, shared[:half])
        y = y + _product(step, call, swiglu(step, call, [gate_up]), shared[half:])
    return x + y


def _product(step: Step, call: Call, x: Tensor, weight: Sequence[Value]) -> Tensor:
    if len(weight) == 1:
        return x @ weight[0].T
    return linear_int4(step, call, [x, *weight])


FUSED_REFERENCE: dict[str, Operator] = {
    **REFERENCE,
    "cuda.Linear": fused_linear,
    "cuda.LinearInt4": fused_linear,
    "cuda.MoE": fused_moe,
    "cuda.MoEInt4": fused_moe,
}
