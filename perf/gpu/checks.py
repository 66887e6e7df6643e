"""Whole models of kernels against the same weights in float32 PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from measure import make_model, make_runner, rows
from numpy.typing import NDArray
from random_model import V2_LITE, V3_LAYER, make_spec

from deepseek_triton.kernels.int4_tensor import Int4Tensor
from deepseek_triton.runner.base import StepRow
from deepseek_triton.runner.cuda import CudaRunner
from deepseek_triton.runner.cuda_fused_reference import FUSED_REFERENCE
from deepseek_triton.runner.cuda_model import CudaModel

# (rows, new tokens, cached tokens) of steps in turn, on the same rows: whole prompts, chunks after
# them over block boundaries, decodes.
STEPS = ((3, 130, 0), (3, 61, 130), (3, 1, 191), (3, 1, 192), (70, 1, 0), (1, 1, 193))
SPECS = {
    "v2_lite": make_spec(V2_LITE, num_hidden_layers=3, vocab_size=8192),
    "v3": make_spec(V3_LAYER, vocab_size=8192, n_routed_experts=64),
}


def logit_errors(precision: str, group_size: int) -> dict[str, Any]:
    """Return the largest relative error over STEPS: of the kernels, and of PyTorch alone."""
    errors: dict[str, Any] = {}
    for name, spec in SPECS.items():
        model = make_model(spec, precision, group_size)
        limits: dict[str, Any] = {"max_batch_size": 80, "max_context_len": 512}
        runner = make_runner(model, spec, precision, **limits)
        limits["use_graphs"] = False
        plain = make_runner(reference(model, None), spec, precision, **limits)
        exact = make_runner(reference(model, torch.float32), spec, "fp32", **limits)
        kernels, torch_alone = [], []
        for count, new, context in STEPS:
            step = rows(count, new, context, spec.vocab_size, seed=count)
            want = exact.forward(step)
            kernels.append(relative_error(runner.forward(step), want))
            torch_alone.append(relative_error(plain.forward(step), want))
        errors[name] = {
            "kernels": [round(e, 5) for e in kernels],
            "torch": [round(e, 5) for e in torch_alone],
            "ok": bool(max(kernels) < 2 * max(torch_alone)),
            "same_bits": same_bits(runner, rows(5, 1, 40, spec.vocab_size)),
        }
        for each in (runner, plain, exact):
            each.close()
    return errors


def reference(model: CudaModel, dtype: torch.dtype | None) -> CudaModel:
    """Return `model` in plain PyTorch, its weights dense, in their own type or in `dtype`."""

    def dense(value: Any) -> Any:
        if isinstance(value, Int4Tensor):
            value = value.dense()
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating and dtype is not None else value

    names = {"cuda.LinearInt4": "cuda.Linear", "cuda.MoEInt4": "cuda.MoE"}
    calls = [replace(call, op=names.get(call.op, call.op)) for call in model.program.calls]
    weights = {name: dense(value) for name, value in model.weights.items()}
    return CudaModel(
        replace(model.program, calls=tuple(calls)), weights, FUSED_REFERENCE, model.device
    )


def relative_error(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    """Norm of the difference over the norm of `want`; infinite when anything is not finite."""
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def same_bits(runner: CudaRunner, step: tuple[StepRow, ...]) -> bool:
    """Whether the same step gives the same bits every time."""
    first = runner.forward(step)
    return all(np.array_equal(first, runner.forward(step)) for _ in range(5))
