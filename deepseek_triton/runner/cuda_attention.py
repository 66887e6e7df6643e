"""Attention calls on a GPU: paged kernels for decode steps, expanded heads for prefill."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deepseek_triton.kernels.append_kv import append_grouped_query
from deepseek_triton.kernels.grouped_query_decode import grouped_query_decode
from deepseek_triton.kernels.grouped_query_prefill import grouped_query_prefill
from deepseek_triton.kernels.latent_decode import latent_attention_decode
from deepseek_triton.kernels.latent_prefill import latent_attention_prefill
from deepseek_triton.runner.cuda_program import Call
from deepseek_triton.runner.cuda_reference import Value
from deepseek_triton.runner.cuda_step import Decode, Step


def latent_attention(step: Step, call: Call, inputs: Sequence[Value]) -> tuple[Tensor, None]:
    """deepseek.LatentAttention → o [T, H·v]; the new rows are written into the pool."""
    q, kv_a, kv_norm, w_uk, w_uv, cos, sin = inputs[:7]
    attention = step.attention
    common = (q, kv_a, kv_norm, call.attributes["epsilon"], w_uk, w_uv, cos, sin)
    cache = (step.pools[call.inputs[8]], step.slots)
    settings = {
        "scale": call.attributes["scale"],
        "interleaved": bool(call.number("rotary_interleaved")),
    }
    if isinstance(attention, Decode):
        lengths = (attention.block_tables, attention.context_lens)
        return latent_attention_decode(*common, *cache, *lengths, **settings), None
    ragged = (attention.cu_q, attention.cu_k, attention.key_slots)
    max_q = max(attention.q_lens)
    return latent_attention_prefill(*common, *cache, *ragged, max_q=max_q, **settings), None


def grouped_query_attention(
    step: Step, call: Call, inputs: Sequence[Value]
) -> tuple[Tensor, None, None]:
    """deepseek.GroupedQueryAttention → o [T, H·d]; the new rows are written into the pools."""
    dim, attention = call.number("head_dim"), step.attention
    q, k, v = (x.unflatten(1, (-1, dim)) for x in inputs[:3])
    cos, sin = inputs[3:5]
    pools = (step.pools[call.inputs[6]], step.pools[call.inputs[7]])
    interleaved = bool(call.number("rotary_interleaved"))
    q, k = append_grouped_query(q, k, v, cos, sin, *pools, step.slots, interleaved=interleaved)
    scale = call.attributes["scale"]
    if isinstance(attention, Decode):
        lengths = (attention.block_tables, attention.context_lens)
        out = grouped_query_decode(q, *pools, *lengths, scale=scale)
    else:
        ragged = (attention.cu_q, attention.cu_k, attention.key_slots)
        max_q = max(attention.q_lens)
        out = grouped_query_prefill(q, k, v, *pools, *ragged, max_q=max_q, scale=scale)
    return out.flatten(1), None, None
