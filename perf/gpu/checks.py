"""Whole models of kernels against the same weights in PyTorch, in float32 and in their own type.

Where two computations round differently, a token may choose another expert, and its logits then
differ by tens of percent although nothing is wrong. So the references follow the kernels' choices,
and the tokens that would have chosen otherwise are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from measure import make_model, make_runner, rows
from numpy.typing import NDArray
from random_model import (
    DISTILL_LLAMA_8B,
    DISTILL_QWEN_7B,
    MOE_16B,
    V2_LITE,
    V3_LAYER,
    make_spec,
)
from torch import Tensor

from deepseek_triton.kernels.int4_tensor import Int4Tensor
from deepseek_triton.kernels.router import choose_experts
from deepseek_triton.kernels.routing import Routing
from deepseek_triton.runner import cuda_fused_reference, cuda_graphs, cuda_kernels
from deepseek_triton.runner.base import StepRow
from deepseek_triton.runner.cuda import CudaRunner
from deepseek_triton.runner.cuda_fused_reference import FUSED_REFERENCE
from deepseek_triton.runner.cuda_model import CudaModel
from deepseek_triton.runner.cuda_program import Call
from deepseek_triton.runner.cuda_reference import Value
from deepseek_triton.runner.cuda_reference import route as reference_route
from deepseek_triton.runner.cuda_step import Step

# (rows, new tokens, cached tokens) of steps in turn on the same blocks: whole prompts, chunks over
# a block's end, decodes at the last slot of a block and at the first of another, one row alone.
STEPS = ((3, 130, 0), (3, 125, 130), (3, 1, 255), (3, 1, 256), (1, 1, 257), (70, 1, 0))
_ROWS, _BLOCKS = 3, 5  # of the rows that the steps before the last share
LIMIT = 0.05  # of the relative error, whatever PyTorch's is
LOG_PROB_LIMIT = 0.25  # nats, the largest of 200 tokens

SHAPES = {"num_hidden_layers": 3, "vocab_size": 8192}
SPECS = {
    "v2_lite": make_spec(V2_LITE, **SHAPES),
    "v3": make_spec(V3_LAYER, vocab_size=8192, n_routed_experts=64),
    "llama": make_spec(DISTILL_LLAMA_8B, **SHAPES),
    "qwen2": make_spec(DISTILL_QWEN_7B, **SHAPES),
    "moe_16b": make_spec(MOE_16B, **SHAPES),
}
CASES = (
    *((name, "bf16", 0) for name in SPECS),
    *((name, "fp16", 0) for name in ("v2_lite", "qwen2")),
    *((name, "bf16", 128) for name in ("v2_lite", "v3", "llama")),
)
"""Model, precision, group size of INT4 weights."""


class Choices:
    """Experts that the kernels choose in a step, for references to follow, layer by layer."""

    def __init__(self) -> None:
        self._made: list[Tensor] = []
        self._next = 0
        self.total = self.different = (
            0  # choices of a reference; those that it would make otherwise
        )

    def record(
        self,
        x: Tensor,
        weight: Tensor,
        norm_weight: Tensor,
        eps: float,
        routing: Routing,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Do what kernels.router.choose_experts does, and keep the ids."""
        normed, ids, weights = choose_experts(x, weight, norm_weight, eps, routing, bias)
        self._made.append(ids[:, : routing.top_k].long())
        return normed, ids, weights

    def follow(self, step: Step, call: Call, inputs: Sequence[Value]) -> tuple[Tensor, Tensor]:
        """Do what cuda_reference.route does, with the ids of the kernels' layer."""
        ids = self._made[self._next]
        self._next += 1
        own, _ = reference_route(step, call, inputs)
        same = (own.sort(dim=1).values == ids.sort(dim=1).values).all(dim=1)
        real = step.positions >= 0  # the others are padding
        self.total += int(real.sum())
        self.different += int((real & ~same).sum())
        sigmoid = "Sigmoid" in call.op
        weights = (inputs[0].sigmoid() if sigmoid else inputs[0].softmax(-1)).gather(1, ids)
        if sigmoid and call.attributes["normalize"]:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * call.attributes["scaling_factor"]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, kernels run a new step."""
        self._made = []
        with patch.object(cuda_kernels, "choose_experts", self.record):
            yield

    @contextmanager
    def following(self) -> Iterator[None]:
        """Inside, a reference runs the same step, and its choices are counted."""
        self._next = self.total = self.different = 0
        with patch.object(cuda_fused_reference, "route", self.follow):
            yield


def logit_errors() -> dict[str, Any]:
    """Return what `compare` finds of every case."""
    errors: dict[str, Any] = {}
    for case in CASES:
        name = "{}_{}{}".format(*case[:2], f"_int4_{case[2]}" if case[2] else "")
        errors[name] = compare(SPECS[case[0]], *case[1:])
        print(f"  {name}: {errors[name]}", flush=True)
    failed = [name for name, found in errors.items() if not found["ok"]]
    if failed:
        raise RuntimeError(f"logits are wrong: {failed}: {errors}")
    return errors


@patch.multiple(cuda_graphs, BATCHES=(1, 4), PROMPT_BUCKETS=((512, 16),))
def compare(spec: Any, precision: str, group_size: int) -> dict[str, Any]:
    """Relative errors of logits against float32, step by step: kernels, PyTorch alone, graphs.

    The cache begins as NaN, so that a slot that nothing wrote shows if it is read.
    """
    model = make_model(spec, precision, group_size)
    limits: dict[str, Any] = {"max_batch_size": 80, "max_context_len": 512, "num_blocks": 80}
    in_graphs = make_runner(model, spec, precision, **limits)
    limits["use_graphs"] = False
    kernels = make_runner(model, spec, precision, **limits)
    plain = make_runner(reference(model, None), spec, precision, **limits)
    exact = make_runner(reference(model, torch.float32), spec, "fp32", **limits)
    runners = (in_graphs, kernels, plain, exact)
    for runner in runners:
        for pool in runner._pools.values():
            pool.fill_(torch.nan)
    choices, total, different = Choices(), 0, 0
    found: dict[str, list[float]] = {"kernels": [], "torch": [], "graphs": []}
    for count, new, context in STEPS:
        step = rows(_ROWS, new, context, spec.vocab_size, 3, _BLOCKS)[:count]
        if count > _ROWS:
            step = rows(count, new, context, spec.vocab_size)
        for name, pool in in_graphs._pools.items():
            pool.copy_(kernels._pools[name])
        with choices.recording():
            got = kernels.forward(step)
        with choices.following():
            want = exact.forward(step)
        total, different = total + choices.total, different + choices.different
        found["kernels"].append(relative_error(got, want))
        with choices.following():
            found["torch"].append(relative_error(plain.forward(step), want))
        found["graphs"].append(relative_error(in_graphs.forward(step), got))
    result: dict[str, Any] = {name: [round(e, 5) for e in values] for name, values in found.items()}
    result["log_probs"] = score_error(kernels, exact, choices, spec.vocab_size)
    worst, allowed = max(found["kernels"]), min(LIMIT, 2 * max(found["torch"]))
    result |= {
        "choices": total,
        "other_experts": different,
        "same_bits": same_bits(in_graphs, rows(_ROWS, 1, 256, spec.vocab_size, 3, _BLOCKS)),
        "ok": worst < allowed
        and max(found["graphs"][2:]) < LIMIT
        and result["log_probs"] < LOG_PROB_LIMIT,
    }
    for runner in runners:
        runner.close()
    return result


def score_error(kernels: CudaRunner, exact: CudaRunner, choices: Choices, vocab: int) -> float:
    """Return the largest error of a log prob of 200 given tokens."""
    (row,) = rows(1, 200, 0, vocab)
    row = replace(row, sampling=None, next_token_id=0)
    with choices.recording():
        (got,) = kernels.score((row,))
    with choices.following():
        (want,) = exact.score((row,))
    return float(np.abs(got.log_probs - want.log_probs).max())


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
