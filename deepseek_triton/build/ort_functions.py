"""DeepSeek's operators for ONNX Runtime's CPU kernels, in place of the portable bodies.

They keep the conventions of export/functions; `com.microsoft` is ONNX Runtime's own domain.

A token's numbers must not depend on its company, down to the last bit: then a request gives the
same text alone and under load. ONNX Runtime's products sum in another order when they have a single
row and an unpacked right side, or at most 64 columns a thread. So
- the weights of each head are a constant of their own, which is packed (ByHead);
- no expert computes a single token (ExtraRows);
- the runner keeps attention's columns above 64 (runner/ort_shapes.py).
This costs about 10% of a decode step.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Template

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

BY_HEAD = Template("""
# The columns of each head times the head's own weight.
#   x [T, H·K], H weights [K, N] → y [T, H·N]
ByHead (x, $weights) => (y) {
    $parts = Split <axis = 1, num_outputs = $num_heads> (x)
    $products
    y = Concat <axis = 1> ($results)
}
""")

# pool must come straight from ScatterND: anything between them, a Reshape too, makes the runtime
# copy the whole pool. It is read through the output only, since reads of the input are not ordered
# after the write.
ATTENTION_IN_PLACE = Template("""
# LatentAttention that writes its new rows into the pool and then attends to cached rows alone.
# kv_pool and pool are bound to one buffer.
#   H weights w_uk [nope, rank], H weights w_uv [rank, v],
#   slot_mapping [T, 2] int64 (block, offset) of each new row, mask [B, S, 1, M·block_size] float32;
#   the rest as LatentAttention → o [T, H·v], pool [N, block_size, W]
LatentAttentionInPlace
    <num_heads, qk_head_dims, latent_dims, v_head_dim, scale, epsilon, rotary_interleaved>
    (q, kv_a, kv_norm, $w_uk, $w_uv, cos, sin, turn, kv_pool, block_tables, mask, slot_mapping)
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
    q_nope_flat = Reshape (q_nope, flat)
    q_latent_flat = deepseek.ByHead (q_nope_flat, $w_uk)
    q_latent = Reshape (q_latent_flat, q_shape)
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

    # Back from the latent space: [T, H·rank] → [T, H·v].
    query_tokens = Shape <start = 0, end = 1> (q)
    by_token = Concat <axis = 0> (query_tokens, rest)
    latent_flat = Reshape (latent_sum, by_token)
    o = deepseek.ByHead (latent_flat, $w_uv)
}
""")

# The rows of `cover` are made by build/onnxruntime.py.
EXTRA_ROWS = """
# Rows that the experts compute besides the T tokens, so that none of them computes a single one.
# Fewer than `few` tokens are each repeated; more are joined by rows that name every expert.
#   input_ids [B, S], cover [C, E] → tokens [1] = T, count [1], repeat bool, covering [count, E]
ExtraRows <few> (input_ids, cover) => (tokens, count, repeat, covering) {
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    vector = Constant <value_ints = [1]> ()
    limit = Constant <value_int: int = @few> ()
    total = Size (input_ids)
    cover_shape = Shape <start = 0, end = 1> (cover)
    cover_rows = Squeeze (cover_shape)
    repeat = Less (total, limit)
    extra = Where (repeat, total, cover_rows)
    row = Range (zero, extra, one)
    cover_row = Mod (row, cover_rows)
    covering = Gather <axis = 0> (cover, cover_row)
    tokens = Reshape (total, vector)
    count = Reshape (extra, vector)
}
"""

# The kernel chooses the k largest router_probs and weighs by their softmax. The logarithms of the
# weights give back weights / sum(weights); where a weight is 0, -1e30 makes it 0 again.
EXPERTS_SPARSE = """
# Experts through ONNX Runtime's MoE kernel, which computes the chosen ones only.
# k is top_k's element, since the kernel wants a single integer; tokens to covering are ExtraRows'.
#   the rest as Experts → y [T, D]
ExpertsSparse <num_experts, top_k, k>
    (x, expert_ids, expert_weights, gate_up, down, tokens, count, repeat, covering) => (y)
{
    experts = Constant <value_ints: ints = @num_experts> ()
    dense_shape = Concat <axis = 0> (tokens, experts)
    zeros = ConstantOfShape <value = float[1] {0.0}> (dense_shape)
    dense_weights = ScatterElements <axis = 1> (zeros, expert_ids, expert_weights)
    logs = Log (dense_weights)
    lowest = Constant <value_float = -1e30> ()
    own_probs = Max (logs, lowest)

    begin = Constant <value_ints = [0]> ()
    extra_x = Slice (x, begin, count)
    all_x = Concat <axis = 0> (x, extra_x)
    repeated = Slice (own_probs, begin, count)
    extra_probs = Where (repeat, repeated, covering)
    all_probs = Concat <axis = 0> (own_probs, extra_probs)
    all_means = com.microsoft.MoE <
        k: int = @k, normalize_routing_weights = 1, activation_type = "swiglu",
        swiglu_fusion = 1, activation_alpha = 1.0, activation_beta = 0.0
    > (all_x, all_probs, gate_up, , down)
    mean = Slice (all_means, begin, tokens)
    last = Constant <value_ints = [-1]> ()
    total = ReduceSum <keepdims = 1> (expert_weights, last)
    y = Mul (mean, total)
}
"""


def ort_functions(num_heads: int) -> Mapping[str, onnx.FunctionProto]:
    """Return this target's functions by name, for a model with `num_heads` attention heads."""
    library = {}
    texts = (MASK_IN_PLACE, _by_head(num_heads), _attention(num_heads), EXTRA_ROWS, EXPERTS_SPARSE)
    for function in map(define_function, texts):
        function.opset_import.add(domain=CONTRIB_DOMAIN, version=CONTRIB_VERSION)
        library[function.name] = function
    return library


def _names(prefix: str, count: int) -> str:
    return ", ".join(f"{prefix}_{i}" for i in range(count))


def _by_head(num_heads: int) -> str:
    products = [f"result_{i} = MatMul (part_{i}, weight_{i})" for i in range(num_heads)]
    return BY_HEAD.substitute(
        num_heads=num_heads,
        weights=_names("weight", num_heads),
        parts=_names("part", num_heads),
        products="\n    ".join(products),
        results=_names("result", num_heads),
    )


def _attention(num_heads: int) -> str:
    return ATTENTION_IN_PLACE.substitute(
        w_uk=_names("w_uk", num_heads), w_uv=_names("w_uv", num_heads)
    )
