"""Every operator of the portable model in plain PyTorch: the reference, and the fp32 mode.

Each follows the body of its ONNX function (export/functions/), except that KV rows are written into
the pools in place and attention reads them there. Runs on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from deepseek_triton.runner.cuda_program import Call, numpy_dtype
from deepseek_triton.runner.cuda_step import Decode, Step

Value = Any  # a Tensor, a host NumPy array for int64 constants, or None
Operator = Callable[[Step, Call, Sequence[Value]], "Tensor | tuple[Tensor | None, ...]"]

_NEVER = -1e30


def linear(_step: Step, _call: Call, inputs: Sequence[Value]) -> Tensor:
    """Product of x [T, K] and weight [N, K], plus a bias [N] if there is one → [T, N]."""
    x, weight, *bias = inputs
    return torch.nn.functional.linear(x, weight, *bias)


def rms_norm_of(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last axis, computed in float32 (arXiv 1910.07467)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return normed.to(x.dtype) * weight


def rms_norm(_step: Step, call: Call, inputs: Sequence[Value]) -> Tensor:
    """Norm of x [..., D] with the weight [D] → [..., D]."""
    return rms_norm_of(inputs[0], inputs[1], call.attributes["epsilon"])


def squared_norm(step: Step, _call: Call, inputs: Sequence[Value]) -> Tensor:
    """Sums of the squares of x [T, D] → [T, 1] float32; [0, 1] when every token has its logits.

    They show that x overflowed as well, and a kernel is saved.
    """
    x: Tensor = inputs[0]
    if step.logit_rows is None:
        return x.new_empty((0, 1), dtype=torch.float32)
    # The norm, not its square: one kernel, and the sum inside overflows alike.
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)


def swiglu(_step: Step, _call: Call, inputs: Sequence[Value]) -> Tensor:
    """gate_up [T, 2·F] → silu(gate) · up [T, F]."""
    gate, up = inputs[0].chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rotary_angles(_step: Step, call: Call, inputs: Sequence[Value]) -> tuple[Tensor, Tensor]:
    """Angles of positions [T] by inv_freq [R] → cos, sin [T, R] float32, times `scale` (yarn)."""
    angles = inputs[0].float()[:, None] * inputs[1]
    scale = call.attributes["scale"]
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn each pair of dimensions of x [T, ..., R] by its angle (arXiv 2104.09864)."""
    cos, sin = (angle.view(len(x), *(1,) * (x.ndim - 2), -1) for angle in (cos, sin))
    wide = x.float()
    if interleaved:
        turned = torch.stack((-wide[..., 1::2], wide[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    return (wide * cos + turned * sin).to(x.dtype)


def append(pool: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Write rows [T, W] into pool [N, block_size, W] at `slots` [T]; −1 writes nothing that counts.

    The last block is the runner's own scratch block: padding goes there.
    """
    flat = pool.view(-1, pool.shape[-1])
    flat[torch.where(slots < 0, len(flat) - 1, slots).long()] = rows


def cached_rows(step: Step, pool: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield, row by row, the slice of its tokens, its keys [K, W] and mask [S, K] (0 or −1e30)."""
    block_size = pool.shape[1]
    if isinstance(step.attention, Decode):
        tables, lens = step.attention.block_tables, step.attention.context_lens
        offsets = torch.arange(tables.shape[1] * block_size, device=pool.device)
        for row in range(len(lens)):
            keys = pool[tables[row].long()].flatten(0, 1)
            visible = offsets < lens[row]
            # A slot that is not visible may hold anything, NaN included.
            keys = torch.where(visible[:, None], keys, 0)
            yield slice(row, row + 1), keys, torch.where(visible, 0.0, _NEVER)[None]
        return
    flat = pool.view(-1, pool.shape[-1])
    slots = step.slots.long() if step.attention.key_slots is None else step.attention.key_slots
    # The running sums, not the lengths: rows packed into a bucket have theirs there alone.
    q_ends, k_ends = step.attention.cu_q.tolist(), step.attention.cu_k.tolist()
    for (q_begin, q_end), (k_begin, k_end) in zip(pairwise(q_ends), pairwise(k_ends), strict=True):
        q_len, k_len = q_end - q_begin, k_end - k_begin
        keys = flat[slots[k_begin:k_end]]
        query = torch.arange(k_len - q_len, k_len, device=pool.device)[:, None]
        hidden = torch.arange(k_len, device=pool.device) > query
        yield slice(q_begin, q_end), keys, torch.where(hidden, _NEVER, 0.0)


def latent_attention(step: Step, call: Call, inputs: Sequence[Value]) -> tuple[Tensor, None]:
    """The absorbed form of latent attention (arXiv 2405.04434, section 2.1) → o [T, H·v]."""
    q, kv_a, kv_norm, w_uk, w_uv, cos, sin = inputs[:7]
    pool = step.pools[call.inputs[8]]
    attributes, interleaved = call.attributes, bool(call.number("rotary_interleaved"))
    rank, rope = attributes["latent_dims"]
    nope, _ = attributes["qk_head_dims"]
    latent = rms_norm_of(kv_a[:, :rank], kv_norm, attributes["epsilon"])
    k_rope = rotate(kv_a[:, rank:], cos, sin, interleaved)
    append(pool, torch.cat((latent, k_rope), dim=-1), step.slots)

    heads = q.view(len(q), call.number("num_heads"), nope + rope)
    q_latent = torch.einsum("thn,hnr->thr", heads[..., :nope], w_uk)
    q_rope = rotate(heads[..., nope:], cos, sin, interleaved)
    query = torch.cat((q_latent, q_rope), dim=-1) * attributes["scale"]
    context = torch.empty_like(q_latent)
    for tokens, keys, mask in cached_rows(step, pool):
        scores = torch.einsum("shw,kw->hsk", query[tokens], keys).float() + mask
        weights = scores.softmax(-1).to(q.dtype)
        context[tokens] = torch.einsum("hsk,kr->shr", weights, keys[:, :rank])
    return torch.einsum("thr,hrv->thv", context, w_uv).flatten(1), None


def grouped_query_attention(
    step: Step, call: Call, inputs: Sequence[Value]
) -> tuple[Tensor, None, None]:
    """Attention whose heads share keys in groups (arXiv 2305.13245) → o [T, H·d]."""
    q, k, v, cos, sin = inputs[:5]
    k_pool, v_pool = (step.pools[name] for name in call.inputs[6:8])
    dim, groups = call.number("head_dim"), call.number("num_kv_heads")
    interleaved = bool(call.number("rotary_interleaved"))
    append(
        k_pool, rotate(k.unflatten(1, (groups, dim)), cos, sin, interleaved).flatten(1), step.slots
    )
    append(v_pool, v, step.slots)
    query = rotate(q.unflatten(1, (-1, dim)), cos, sin, interleaved) * call.attributes["scale"]
    query = query.unflatten(1, (groups, -1))
    out = torch.empty_like(query)
    pairs = zip(cached_rows(step, k_pool), cached_rows(step, v_pool), strict=True)
    for (tokens, keys, mask), (_, values, _) in pairs:
        keys, values = keys.unflatten(1, (groups, dim)), values.unflatten(1, (groups, dim))
        scores = torch.einsum("sgnd,kgd->gnsk", query[tokens], keys).float() + mask
        weights = scores.softmax(-1).to(q.dtype)
        out[tokens] = torch.einsum("gnsk,kgd->sgnd", weights, values)
    return out.flatten(1), None, None


def route(_step: Step, call: Call, inputs: Sequence[Value]) -> tuple[Tensor, Tensor]:
    """Logits [T, E] float32 → expert ids [T, K] int64, weights [T, K] float32, of all four kinds.

    DeepSeek-V2 (arXiv 2405.04434, section 2.1.2) and V3 (arXiv 2412.19437, eq. 12–16). Of equal
    scores the lower id comes first.
    """
    logits, *bias = inputs
    top_k, sigmoid = call.number("top_k"), "Sigmoid" in call.op
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    choice = scores + bias[0] if sigmoid else scores
    if call.op.endswith("Grouped"):
        grouped = choice.unflatten(1, (call.number("num_groups"), -1))
        best = grouped.topk(2, dim=-1).values.sum(-1) if sigmoid else grouped.amax(-1)
        ids = _first_of_largest(best, call.number("top_groups"))
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, ids, True)
        choice = torch.where(kept[..., None], grouped, _NEVER if sigmoid else 0.0).flatten(1)
    ids = _first_of_largest(choice, top_k)
    weights = (scores if sigmoid else choice).gather(1, ids)
    if sigmoid and call.attributes["normalize"]:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * call.attributes["scaling_factor"]


def _first_of_largest(values: Tensor, count: int) -> Tensor:
    """Return the indices [T, count] of the largest values, the lower index first among equals."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def experts(_step: Step, _call: Call, inputs: Sequence[Value]) -> Tensor:
    """Weighted sum of the chosen experts' SwiGLU MLPs; rows of gate and up are interleaved.

    x [T, D], ids and weights [T, K], gate_up [E, 2·F, D], down [E, D, F] → [T, D].
    """
    x, ids, weights, gate_up, down = inputs
    dense = torch.zeros((len(x), len(gate_up)), dtype=torch.float32, device=x.device)
    dense.scatter_add_(1, ids.long(), weights)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(gate_up)):  # every expert: which are chosen is known to the device only
        both = x @ gate_up[expert].T
        hidden = torch.nn.functional.silu(both[:, 0::2]) * both[:, 1::2]
        total += (hidden @ down[expert].T).float() * dense[:, expert, None]
    return total.to(x.dtype)


def unpack_int4(packed: Tensor) -> Tensor:
    """Codes [..., K/2] uint8, low nibble first → [..., K] uint8 in 0 … 15."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def dequantize(codes: Tensor, scales: Tensor, zero_points: Tensor | None, group: int) -> Tensor:
    """(code − zero point) · scale: codes [..., K/2] packed, scales [..., G] → [..., K]."""
    values = unpack_int4(codes).to(scales.dtype)
    zeros = torch.full_like(scales, 8) if zero_points is None else zero_points.to(scales.dtype)
    each = [t.repeat_interleave(group, -1)[..., : values.shape[-1]] for t in (zeros, scales)]
    return (values - each[0]) * each[1]


def linear_int4(_step: Step, call: Call, inputs: Sequence[Value]) -> Tensor:
    """Product of x [T, K] and a weight: codes [N, K/2], scales and zero points [N, G] → [T, N]."""
    x, codes, scales, zeros = inputs
    weight = dequantize(codes, scales, zeros, call.number("group_size"))
    return torch.nn.functional.linear(x, weight)


def experts_int4(step: Step, call: Call, inputs: Sequence[Value]) -> Tensor:
    """As `experts`, with both weights as codes, scales and zero points."""
    x, ids, weights, *quantized = inputs
    group = call.number("group_size")
    gate_up, down = (
        dequantize(codes, scales, zeros, group)
        for codes, scales, zeros in (quantized[:3], quantized[3:])
    )
    return experts(step, call, (x, ids, weights, gate_up, down))


def gather(_step: Step, call: Call, inputs: Sequence[Value]) -> Tensor:
    """Rows, or along another axis for the column order of INT4 weights."""
    data, index = inputs
    if index is None:  # every row
        return data
    axis = int(call.attributes.get("axis", 0))
    return data.index_select(axis, index.reshape(-1))


def split(_step: Step, call: Call, inputs: Sequence[Value]) -> tuple[Tensor, ...]:
    """Views of x, not copies."""
    x, sizes = inputs
    return tuple(x.split(sizes.tolist(), dim=int(call.attributes.get("axis", 0))))


def cast(_step: Step, call: Call, inputs: Sequence[Value]) -> Tensor:
    """Change the element type."""
    name = numpy_dtype(call.attributes["to"]).name
    return inputs[0].to(getattr(torch, name))


REFERENCE: dict[str, Operator] = {
    "Add": lambda _step, _call, inputs: inputs[0] + inputs[1],
    "Cast": cast,
    "Concat": lambda _step, call, inputs: torch.cat(tuple(inputs), dim=call.attributes["axis"]),
    "Gather": gather,
    "Identity": lambda _step, _call, inputs: inputs[0],
    "Reshape": lambda _step, _call, inputs: inputs[0].reshape(inputs[1].tolist()),
    "Split": split,
    "deepseek.Experts": experts,
    "deepseek.ExpertsInt4": experts_int4,
    "deepseek.GroupedQueryAttention": grouped_query_attention,
    "deepseek.LatentAttention": latent_attention,
    "deepseek.Linear": linear,
    "deepseek.LinearBias": linear,
    "deepseek.LinearInt4": linear_int4,
    "deepseek.RMSNorm": rms_norm,
    "deepseek.RotaryAngles": rotary_angles,
    "deepseek.RouteSigmoid": route,
    "deepseek.RouteSigmoidGrouped": route,
    "deepseek.RouteSoftmax": route,
    "deepseek.RouteSoftmaxGrouped": route,
    "deepseek.SquaredNorm": squared_norm,
    "deepseek.SwiGLU": swiglu,
}
