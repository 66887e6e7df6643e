"""How a token picks its experts.

The rules are those of export/functions/routing.py; equal scores go to the lower expert id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.launch import await_inputs, dependent_launch

_NEVER = tl.constexpr(-1e30)  # the score of an expert in a group that was not kept


@dataclass(frozen=True)
class Routing:
    """How experts are chosen. DeepSeek-V2: arXiv 2405.04434, 2.2.2; V3: arXiv 2412.19437, 2.1.2."""

    kind: Literal["softmax", "sigmoid"]
    num_experts: int
    top_k: int
    scaling_factor: float = 1.0
    normalize: bool = False  # sigmoid only: divide by the sum of the chosen scores
    num_groups: int = 1
    top_groups: int = 1
    num_shared: int = 0  # always chosen, with weight 1: expert ids num_experts, num_experts + 1, …


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts: (ids int32, weights float32) [T, K + shared] from logits [T, E] float32.

    `bias` [E] float32 counts for the choice of a sigmoid routing, not for the weights.
    """
    tokens = logits.shape[0]
    columns = routing.top_k + routing.num_shared
    ids = torch.empty(tokens, columns, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, columns, dtype=torch.float32, device=logits.device)
    _route[(tokens,)](
        logits, bias, ids, weights, tokens, routing.scaling_factor,
        num_warps=1,  # reductions stay inside the warp
        **choice_sizes(routing), **dependent_launch(logits),
    )  # fmt: skip
    return ids, weights


def choice_sizes(routing: Routing) -> dict[str, int]:
    """Return the constants of `choose`."""
    size = routing.num_experts // routing.num_groups
    return {
        "GROUPS": routing.num_groups,
        "SIZE": size,
        "BLOCK_G": triton.next_power_of_2(routing.num_groups),
        "BLOCK_S": triton.next_power_of_2(size),
        "TOP_K": routing.top_k,
        "BLOCK_K": triton.next_power_of_2(routing.top_k + routing.num_shared),
        "TOP_GROUPS": routing.top_groups,
        "SHARED": routing.num_shared,
        "SIGMOID": routing.kind == "sigmoid",
        "NORMALIZE": routing.normalize,
    }


def route_reference(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `route` with stable sorts."""
    tokens, experts = logits.shape
    sigmoid = routing.kind == "sigmoid"
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        grouped = choice.view(tokens, routing.num_groups, -1)
        best = grouped.topk(2, -1).values.sum(-1) if sigmoid else grouped.amax(-1)
        order = best.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, order, True)
        excluded = -1e30 if sigmoid else 0.0
        choice = grouped.where(kept[..., None], excluded).reshape(tokens, experts)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = (scores if sigmoid else choice).gather(1, ids)
    if sigmoid and routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * routing.scaling_factor
    shared = torch.arange(experts, experts + routing.num_shared).expand(tokens, -1)
    ones = torch.ones(tokens, routing.num_shared)
    ids = torch.cat([ids, shared.to(ids.device)], 1).int()
    return ids, torch.cat([weights, ones.to(weights.device)], 1)


@triton.jit
def _first_best(choice, position):
    """Return the lowest position of the largest value in each row of `choice` [T, N]."""
    best = tl.max(choice, axis=1)[:, None]
    last: tl.constexpr = position.shape[0] - 1
    return tl.min(tl.where(choice == best, position[None, :], last), axis=1)


@triton.jit
def _keep_groups(
    choice, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIGMOID: tl.constexpr
):  # fmt: skip
    """Return [T, G] bool: the TOP_GROUPS best groups of choice [T, G, S]."""
    best, at = tl.max(choice, axis=2, return_indices=True)
    if SIGMOID:  # a group counts as the sum of its two best
        first = tl.arange(0, choice.shape[2])[None, None, :] == at[:, :, None]
        best += tl.max(tl.where(first, float("-inf"), choice), axis=2)
    g = tl.arange(0, choice.shape[1])
    best = tl.where((g < GROUPS)[None, :], best, float("-inf"))
    kept = best != best
    for _ in tl.static_range(TOP_GROUPS):
        chosen = _first_best(tl.where(kept, float("-inf"), best), g)
        kept = kept | (g[None, :] == chosen[:, None])
    return kept


@triton.jit
def expert_of(position, SIZE: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return the expert at a position of a row of scores, whose groups take BLOCK_S places each."""
    return position // BLOCK_S * SIZE + position % BLOCK_S


@triton.jit
def is_expert(
    position, GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Return whether there is an expert at a position."""
    return (position // BLOCK_S < GROUPS) & (position % BLOCK_S < SIZE)


@triton.jit
def choose(
    logits, token, tokens, bias_ptr, ids_ptr, weights_ptr, scaling_factor,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, TOP_GROUPS: tl.constexpr, SHARED: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Store ids and weights of tokens `token` [T], whose logits [T, BLOCK_G · BLOCK_S] are given.

    Logits lie where `expert_of` says, −inf where there is no expert.
    """
    T: tl.constexpr = logits.shape[0]
    position = tl.arange(0, BLOCK_G * BLOCK_S)
    real = is_expert(position, GROUPS, SIZE, BLOCK_S)[None, :]
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        exps = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = exps / tl.sum(exps, axis=1)[:, None]
    choice = scores
    if bias_ptr is not None:
        expert = expert_of(position, SIZE, BLOCK_S)[None, :]
        choice += tl.load(bias_ptr + expert, mask=real, other=0)
    choice = tl.where(real, choice, float("-inf"))
    if GROUPS > 1:
        grouped = tl.reshape(choice, [T, BLOCK_G, BLOCK_S])
        kept = _keep_groups(grouped, GROUPS, TOP_GROUPS, SIGMOID)
        kept = tl.broadcast_to(kept[:, :, None], [T, BLOCK_G, BLOCK_S])
        kept = tl.reshape(kept, [T, BLOCK_G * BLOCK_S])
        choice = tl.where(real & (kept == 0), _NEVER if SIGMOID else 0.0, choice)
        if not SIGMOID:
            scores = tl.where(kept, scores, 0.0)
    column = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.zeros([T, BLOCK_K], tl.int32) + (GROUPS * SIZE + column - TOP_K)  # shared experts
    weights = tl.zeros([T, BLOCK_K], tl.float32)
    last: tl.constexpr = (GROUPS - 1) * BLOCK_S + SIZE - 1
    for i in tl.static_range(TOP_K):
        chosen = tl.minimum(_first_best(choice, position), last)[:, None]  # also when all are NaN
        here = position[None, :] == chosen
        weight = tl.sum(tl.where(here, scores, 0.0), axis=1)[:, None]
        choice = tl.where(here, float("-inf"), choice)
        ids = tl.where(column == i, expert_of(chosen, SIZE, BLOCK_S), ids)
        weights = tl.where(column == i, weight, weights)
    if NORMALIZE:
        weights = weights / (tl.sum(weights, axis=1)[:, None] + 1e-20)
    weights = tl.where(column < TOP_K, weights * scaling_factor, 1.0)
    at = token[:, None] * (TOP_K + SHARED) + column
    mask = (token < tokens)[:, None] & (column < TOP_K + SHARED)
    tl.store(ids_ptr + at, ids, mask=mask)
    tl.store(weights_ptr + at, weights, mask=mask)


@triton.jit
def _route(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, tokens, scaling_factor,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, TOP_GROUPS: tl.constexpr, SHARED: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program t owns token t."""
    token = tl.program_id(0) + tl.arange(0, 1)
    position = tl.arange(0, BLOCK_G * BLOCK_S)
    real = is_expert(position, GROUPS, SIZE, BLOCK_S)[None, :]
    at = token.to(tl.int64)[:, None] * (GROUPS * SIZE) + expert_of(position, SIZE, BLOCK_S)[None, :]
    await_inputs(PDL)
    logits = tl.load(logits_ptr + at, mask=real, other=float("-inf"))
    choose(
        logits, token, tokens, bias_ptr, ids_ptr, weights_ptr, scaling_factor,
        GROUPS, SIZE, BLOCK_G, BLOCK_S, TOP_K, BLOCK_K, TOP_GROUPS, SHARED, SIGMOID, NORMALIZE,
    )  # fmt: skip
