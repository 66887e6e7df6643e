"""DeepSeek's operators for ONNX Runtime's CPU kernels, in place of the portable bodies.

They keep the conventions of export/functions; `com.microsoft` is ONNX Runtime's own domain.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from deepseek_triton.export.functions import define_function

CONTRIB_DOMAIN = "com.microsoft"
CONTRIB_VERSION = 1

MASK_IN_PLACE = """
# Additive mask of a step over the cached slots alone: 0 up to the query's position, else −1e30.
# New rows are in the cache before it is read, so a slot's place in the block table is its position.
#   positions [B, S], block_tables [B, M] int32 → mask [B, S, 1, M · block_size]
AttentionMaskInPlace <block_size> (positions, block_tables) => (mask) {
    zero = Constant <value = int32 {0}> ()
    one = Constant <value = int32 {1}> ()
    tail_axes = Constant <value_ints = [2, 3]> ()
    block = Constant <value_ints: ints = @block_size> ()
    blocks = Shape <start = 1, end = 2> (block_tables)
    slots = Mul (blocks, block)
    slots_0d = Squeeze (slots)
    slots_int32 = Cast <to = 6> (slots_0d)
    key = Range (zero, slots_int32, one)
    query = Unsqueeze (positions, tail_axes)
    visible = LessOrEqual (key, query)
    open = Constant <value_float = 0.0> ()
    closed = Constant <value_float = -1e30> ()
    mask = Where (visible, open, closed)
}
"""

# pool must come straight from ScatterND: anything between them, a Reshape too, makes the runtime
# copy the whole pool. It is read through the output only, since reads of the input are not ordered
# after the write.
ATTENTION_IN_PLACE = """
# LatentAttention that writes its new rows into the pool and then attends to cached rows alone.
# kv_pool and pool are bound to one buffer.
#   slot_mapping [T, 2] int64 (block, offset) of each new row, mask [B, S, 1, M·block_size] float32;
#   the rest as LatentAttention → o [T, H·v], pool [N, block_size, W]
LatentAttentionInPlace
    <num_heads, qk_head_dims, latent_dims, v_head_dim, scale, epsilon, rotary_interleaved>
    (q, kv_a, kv_norm, w_uk, w_uv, cos, sin, turn, kv_pool, block_tables, mask, slot_mapping)
    => (o, pool)
{
    heads = Constant <value_ints: ints = @num_heads> ()
    qk_sizes = Constant <value_ints: ints = @qk_head_dims> ()
    latent_sizes = Constant <value_ints: ints = @latent_dims> ()
    width = ReduceSum <keepdims = 1> (latent_sizes)
    copy = Constant <value_ints = [0]> ()
    rest = Constant <value_ints = [-1]> ()
    flat = Constant <value_ints = [0, -1]> ()
    batch = Shape <start = 0, end = 1> (block_tables)
    by_row = Concat <axis = 0> (batch, rest, copy)

    # New rows [T, W]: the normed latent, then the key part that all heads share, rotated.
    one_head = Constant <value_ints = [0, 1, -1]> ()
    latent, k_rope = Split <axis = -1> (kv_a, latent_sizes)
    latent_normed = deepseek.RMSNorm <epsilon: float = @epsilon> (latent, kv_norm)
    k_head = Reshape (k_rope, one_head)
    k_rotated = deepseek.Rotary (k_head, cos, sin, turn)
    k_flat = Reshape (k_rotated, flat)
    kv_rows = Concat <axis = -1> (latent_normed, k_flat)
    pool = ScatterND (kv_pool, slot_mapping, kv_rows)

    # Queries [B, S·H, W] in the latent space.
    q_shape = Concat <axis = 0> (copy, heads, rest)
    q_heads = Reshape (q, q_shape)
    q_nope, q_rope = Split <axis = -1> (q_heads, qk_sizes)
    q_nope_by_head = Transpose <perm = [1, 0, 2]> (q_nope)
    q_latent_by_head = MatMul (q_nope_by_head, w_uk)
    q_latent = Transpose <perm = [1, 0, 2]> (q_latent_by_head)
    q_rotated = deepseek.Rotary (q_rope, cos, sin, turn)
    q_rows = Concat <axis = -1> (q_latent, q_rotated)
    query = Reshape (q_rows, by_row)

    # Cached rows [B, M·block_size, W], in the order of the block table.
    blocks = Gather <axis = 0> (pool, block_tables)
    cached_shape = Concat <axis = 0> (copy, rest, width)
    cached = Reshape (blocks, cached_shape)

    # Scores [B, S·H, keys]; the mask is added in [B, S, H, keys].
    scores = com.microsoft.FusedMatMul <transB = 1, alpha: float = @scale> (query, cached)
    tokens = Shape <start = 1, end = 2> (mask)
    keys = Shape <start = 3, end = 4> (mask)
    split_heads = Concat <axis = 0> (copy, tokens, heads, rest)
    join_heads = Concat <axis = 0> (copy, rest, keys)
    scores_4d = Reshape (scores, split_heads)
    masked = Add (scores_4d, mask)
    softmax = Softmax <axis = -1> (masked)
    weights = Reshape (softmax, join_heads)
    sum = MatMul (weights, cached)
    latent_sum, unused_rope = Split <axis = -1> (sum, latent_sizes)

    # Back from the latent space: [T, H, rank] → [T, H·v].
    latent_shape = Concat <axis = 0> (rest, heads, copy)
    latent_heads = Reshape (latent_sum, latent_shape)
    latent_by_head = Transpose <perm = [1, 0, 2]> (latent_heads)
    o_by_head = MatMul (latent_by_head, w_uv)
    o_heads = Transpose <perm = [1, 0, 2]> (o_by_head)
    o = Reshape (o_heads, flat)
}
"""

# The kernel chooses the k largest router_probs and weighs by their softmax. Logarithms of the
# chosen weights give back weights / sum(weights), exactly; −1e30 elsewhere is never chosen, and a
# weight of 0 stays ahead of it.
EXPERTS_SPARSE = """
# Experts through ONNX Runtime's MoE kernel, which computes the chosen ones only.
# Inputs and output as in Experts; k is top_k's element, since the kernel wants a single integer.
ExpertsSparse <num_experts, top_k, k> (x, expert_ids, expert_weights, gate_up, down) => (y) {
    experts = Constant <value_ints: ints = @num_experts> ()
    tokens = Shape <start = 0, end = 1> (x)
    dense_shape = Concat <axis = 0> (tokens, experts)
    never = ConstantOfShape <value = float[1] {-1e30}> (dense_shape)
    lowest = Constant <value_float = -1e29> ()
    logs = Log (expert_weights)
    finite_logs = Max (logs, lowest)
    router_probs = ScatterElements <axis = 1> (never, expert_ids, finite_logs)
    mean = com.microsoft.MoE <
        k: int = @k, normalize_routing_weights = 1, activation_type = "swiglu",
        swiglu_fusion = 1, activation_alpha = 1.0, activation_beta = 0.0
    > (x, router_probs, gate_up, , down)
    last = Constant <value_ints = [-1]> ()
    total = ReduceSum <keepdims = 1> (expert_weights, last)
    y = Mul (mean, total)
}
"""


def ort_functions() -> Mapping[str, onnx.FunctionProto]:
    """Return this target's functions by name, freshly parsed."""
    functions = map(define_function, (MASK_IN_PLACE, ATTENTION_IN_PLACE, EXPERTS_SPARSE))
    library = {}
    for function in functions:
        function.opset_import.add(domain=CONTRIB_DOMAIN, version=CONTRIB_VERSION)
        library[function.name] = function
    return library
