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
from deepseek_triton.kernels.rms_norm import rms_norm

_NEVER = tl.constexpr(-1e30)  # the score of an expert in a group that was not kept
_FEW_TOKENS = 64  # beyond, the router's product takes the tensor cores


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


def router(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (RMS norm of x [T, D] in x's dtype, its product with weight [E, D]: [T, E] float32).

    The product is computed in float32 from the rounded norm; `weight` may be of any float dtype.
    """
    tokens, width = x.shape
    experts = weight.shape[0]
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    if tokens > _FEW_TOKENS:
        normed = rms_norm(x, norm_weight, eps)
        _router_product[(triton.cdiv(tokens, 32), triton.cdiv(experts, 16))](
            normed, weight, logits, tokens, experts,
            K=width, BLOCK_M=32, BLOCK_N=16, BLOCK_K=_block(width, 128), STAGES=3,
            **dependent_launch(x),
        )  # fmt: skip
        return normed, logits
    normed = torch.empty_like(x)
    block_t = 1 if tokens == 1 else 2 if tokens <= 16 else 4
    block_e = 2 if tokens <= 8 else 4
    grid = (triton.cdiv(experts, block_e), triton.cdiv(tokens, block_t))
    _router[grid](
        x, weight, norm_weight, normed, logits, tokens, experts, eps,
        D=width, BLOCK_T=block_t, BLOCK_E=block_e,
        BLOCK_D=_block(width, 2048 if tokens <= 16 else 1024),
        **dependent_launch(x),
    )  # fmt: skip
    return normed, logits


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
    groups = routing.num_groups
    size = routing.num_experts // groups
    _route[(tokens,)](
        logits, bias, ids, weights, routing.scaling_factor,
        GROUPS=groups, SIZE=size,
        BLOCK_G=triton.next_power_of_2(groups), BLOCK_S=triton.next_power_of_2(size),
        TOP_K=routing.top_k, BLOCK_K=triton.next_power_of_2(columns),
        TOP_GROUPS=routing.top_groups, SHARED=routing.num_shared,
        SIGMOID=routing.kind == "sigmoid", NORMALIZE=routing.normalize,
        num_warps=1,  # reductions stay inside the warp
        **dependent_launch(logits),
    )  # fmt: skip
    return ids, weights


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


def _block(width: int, limit: int) -> int:
    return min(limit, max(16, int(triton.next_power_of_2(width))))


@triton.jit
def _router(
    x_ptr, weight_ptr, norm_ptr, normed_ptr, logits_ptr, tokens, experts, eps,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Logits of BLOCK_E experts for BLOCK_T tokens; the first column also stores the norm."""
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid_e = e < experts
    valid_t = t < tokens
    x_rows = x_ptr + t.to(tl.int64)[:, None] * D
    await_inputs(PDL)
    squares = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, :]
        x = tl.load(x_rows + d, mask=valid_t[:, None] & (d < D), other=0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, axis=1) / D + eps)[:, None]
    acc = tl.zeros([BLOCK_T, BLOCK_E, BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, :]
        mask = valid_t[:, None] & (d < D)
        x = tl.load(x_rows + d, mask=mask, other=0)
        norm = tl.load(norm_ptr + d, mask=d < D, other=0)
        normed = ((x.to(tl.float32) * scale).to(x.dtype) * norm).to(x.dtype)
        if tl.program_id(0) == 0:
            tl.store(normed_ptr + t.to(tl.int64)[:, None] * D + d, normed, mask=mask)
        w = tl.load(weight_ptr + e[:, None] * D + d, mask=valid_e[:, None] & (d < D), other=0)
        acc += normed.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :]
    logits = tl.sum(acc, axis=2)
    at = t[:, None] * experts + e[None, :]
    tl.store(logits_ptr + at, logits, mask=valid_t[:, None] & valid_e[None, :])


@triton.jit
def _router_product(
    a_ptr, weight_ptr, logits_ptr, tokens, experts,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Logits of a tile; three TF32 products make up for the bits that one leaves out."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid_m = (m < tokens)[:, None]
    valid_n = (n < experts)[:, None]
    await_inputs(PDL)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        a = tl.load(a_ptr + m.to(tl.int64)[:, None] * K + k, mask=valid_m & (k < K), other=0)
        w = tl.load(weight_ptr + n[:, None] * K + k, mask=valid_n & (k < K), other=0)
        acc = tl.dot(a.to(tl.float32), w.to(tl.float32).T, acc, input_precision="tf32x3")
    at = logits_ptr + m[:, None] * experts + n[None, :]
    tl.store(at, acc, mask=valid_m & (n < experts)[None, :])


@triton.jit
def _first_best(choice, position, size: tl.constexpr):
    """Return the largest value of `choice` [size], and its lowest position."""
    best = tl.max(choice, axis=0)
    return best, tl.min(tl.where(choice == best, position, size - 1), axis=0)


@triton.jit
def _keep_groups(
    choice, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    TOP_GROUPS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """Return [BLOCK_G] bool: the TOP_GROUPS best groups of choice [BLOCK_G, BLOCK_S]."""
    best, at = tl.max(choice, axis=1, return_indices=True)
    if SIGMOID:  # a group counts as the sum of its two best
        first = tl.arange(0, BLOCK_S)[None, :] == at[:, None]
        best += tl.max(tl.where(first, float("-inf"), choice), axis=1)
    g = tl.arange(0, BLOCK_G)
    best = tl.where(g < GROUPS, best, float("-inf"))
    kept = g < 0
    for _ in tl.static_range(TOP_GROUPS):
        value, chosen = _first_best(tl.where(kept, float("-inf"), best), g, BLOCK_G)
        kept = kept | (g == chosen)
    return kept


@triton.jit
def _route(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, scaling_factor,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, TOP_GROUPS: tl.constexpr, SHARED: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token: experts lie in a [BLOCK_G, BLOCK_S] tile, one row a group, padded."""
    token = tl.program_id(0)
    g = tl.arange(0, BLOCK_G)[:, None]
    s = tl.arange(0, BLOCK_S)[None, :]
    real = (g < GROUPS) & (s < SIZE)
    expert = g * SIZE + s
    await_inputs(PDL)
    logits = tl.load(
        logits_ptr + token.to(tl.int64) * (GROUPS * SIZE) + expert, mask=real, other=float("-inf")
    )
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        exps = tl.exp(logits - tl.max(logits))
        scores = exps / tl.sum(exps)
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + expert, mask=real, other=0)
    choice = tl.where(real, choice, float("-inf"))
    if GROUPS > 1:
        kept = _keep_groups(choice, GROUPS, BLOCK_G, BLOCK_S, TOP_GROUPS, SIGMOID)
        excluded = _NEVER if SIGMOID else 0.0
        choice = tl.where(real & (kept[:, None] == 0), excluded, choice)
        if not SIGMOID:
            scores = tl.where(kept[:, None], scores, 0.0)
    choice = tl.reshape(choice, [BLOCK_G * BLOCK_S])
    scores = tl.reshape(scores, [BLOCK_G * BLOCK_S])
    position = tl.arange(0, BLOCK_G * BLOCK_S)
    column = tl.arange(0, BLOCK_K)
    ids = GROUPS * SIZE + column - TOP_K  # what shared experts hold
    weights = tl.zeros([BLOCK_K], tl.float32)
    for i in tl.static_range(TOP_K):
        value, chosen = _first_best(choice, position, BLOCK_G * BLOCK_S)
        chosen = tl.minimum(chosen, (GROUPS - 1) * BLOCK_S + SIZE - 1)  # also when all are NaN
        weight = tl.sum(tl.where(position == chosen, scores, 0.0), axis=0)
        choice = tl.where(position == chosen, float("-inf"), choice)
        ids = tl.where(column == i, (chosen // BLOCK_S) * SIZE + chosen % BLOCK_S, ids)
        weights = tl.where(column == i, weight, weights)
    if NORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    weights = tl.where(column < TOP_K, weights * scaling_factor, 1.0)
    at = token * (TOP_K + SHARED) + column
    tl.store(ids_ptr + at, ids, mask=column < TOP_K + SHARED)
    tl.store(weights_ptr + at, weights, mask=column < TOP_K + SHARED)
