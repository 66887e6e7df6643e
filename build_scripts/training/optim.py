"""Muon for matrices, AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .model import DemoModel

# Newton-Schulz coefficients for the polar factor: https://kellerjordan.github.io/posts/muon/
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """Return [n, a, b] with all singular values of each matrix moved near 1."""
    x = update.bfloat16() if update.is_cuda else update.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, matrices of one shape at once.

    Scaled to the size of an AdamW step, 0.2 * sqrt(longer side), as in "Muon is Scalable for LLM
    Training" (arXiv 2502.16982). Three-dimensional parameters are stacks of matrices.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            by_shape[tuple(parameter.shape)].append(parameter)
        groups: list[dict[str, Any]] = [{"params": group} for group in by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters in place from their gradients."""
        for group in self.param_groups:
            parameters = group["params"]
            shape = parameters[0].shape
            gradients = torch.stack([p.grad for p in parameters]).view(-1, *shape[-2:])
            state = self.state[parameters[0]]
            if not state:
                state["momentum"] = torch.zeros_like(gradients)
            buffer = state["momentum"].lerp_(gradients, 1 - group["momentum"])
            update = orthogonalise(gradients.lerp(buffer, group["momentum"]))
            scale = 0.2 * max(shape[-2:]) ** 0.5
            updates = list(update.view(len(parameters), *shape).to(parameters[0].dtype).unbind())
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, updates, alpha=-group["lr"] * scale)


def make_optimizers(
    model: DemoModel, matrix_lr: float, other_lr: float
) -> list[torch.optim.Optimizer]:
    """Muon over the layers' matrices; AdamW over embeddings, head, routers and norms."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        outer = "embed_tokens" in name or "lm_head" in name or name.endswith("gate.weight")
        (others if outer or parameter.ndim < 2 else matrices).append(parameter)
    adamw = torch.optim.AdamW(
        others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda
    )
    return [Muon(matrices, matrix_lr), adamw]
