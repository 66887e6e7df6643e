"""Attention for ONNX Runtime's kernels: new rows are written into the pools in place.

The CPU's kernels and CUDA's share the bodies but for two steps:

    step                        CPU                        CUDA
    to and from the latent      a product for each head,   one batched product
                                or one of 8-bit integers
    rows for ScatterND          the new ones               blank ones as well, which clear slots

Casts around the softmax are for CUDA: the CPU computes in float32 alone, and drops them.
"""

from __future__ import annotations

from string import Template

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

# Rows are rounded to 8 bits and integers multiplied: exactly, so a row's company cannot change it.
# Codes of both sides are unsigned, since processors without VNNI add up signed ones of 8 bits with
# saturation.
BY_HEAD_INT8 = """
# The rows of each head times the head's own weight.
#   x [H, T, K], codes UINT8 [H, K, N] with zero at 128, scales [H, 1, N] → y [H, T, N]
ByHeadInt8 (x, codes, scales) => (y) {
    last = Constant <value_ints = [-1]> ()
    step = Constant <value_float = 0.007874016> ()
    least = Constant <value_float = 1e-30> ()
    one = Constant <value_float = 1.0> ()
    zero = Constant <value = uint8 {128}> ()
    magnitudes = Abs (x)
    largest = ReduceMax <keepdims = 1> (magnitudes, last)
    steps = Mul (largest, step)
    x_scales = Max (steps, least)
    x_steps = Div (x, x_scales)
    x_codes = QuantizeLinear (x_steps, one, zero)
    products = MatMulInteger (x_codes, codes, zero, zero)
    sums = Cast <to = 1> (products)
    by_column = Mul (sums, scales)
    y = Mul (by_column, x_scales)
}
"""

# pool must come straight from ScatterND: anything between them, a Reshape too, makes the runtime
# copy the whole pool. It is read through the output only, since reads of the input are not ordered
# after the write.
LATENT_IN_PLACE = Template("""
# $portable that writes its new rows into the pool and then attends to cached rows alone.
# kv_pool and pool are bound to one buffer.
#   slot_mapping [T, 2] int64 (block, offset) of each new row, mask [B, S, 1, M·block_size] float32;
#   $differences
#   the rest as LatentAttention → o [T, H·v], pool [N, block_size, W]
${portable}InPlace
    <num_heads, qk_head_dims, latent_dims, v_head_dim, scale, epsilon, rotary_interleaved>
    (q, kv_a, kv_norm, $w_uk, $w_uv, cos, sin, turn, kv_pool, block_tables, mask,
     slot_mapping$blank) => (o, pool)
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
    $write

    # Queries [B, S·H, W] in the latent space.
    q_shape = Concat <axis = 0> (copy, heads, rest)
    q_heads = Reshape (q, q_shape)
    q_nope, q_rope = Split <axis = -1> (q_heads, qk_sizes)
    $to_latent
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
    scores_float = Cast <to = 1> (scores_4d)
    masked = Add (scores_float, mask)
    softmax = Softmax <axis = -1> (masked)
    shares = CastLike (softmax, q)
    weights = Reshape (shares, join_heads)
    sum = MatMul (weights, cached)
    latent_sum, unused_rope = Split <axis = -1> (sum, latent_sizes)

    # Back from the latent space: [T, H·rank] → [T, H·v].
    $from_latent
}
""")

GROUPED_QUERY_IN_PLACE = Template("""
# GroupedQueryAttention that writes its new rows into the pools and then attends to cached rows
# alone. k_pool and k_pool_out are bound to one buffer, v_pool and v_pool_out to another.
#   slot_mapping [T, 2] int64 (block, offset) of each new row, mask [B, S, 1, M·block_size] float32;
#   $differences
#   the rest as GroupedQueryAttention → o [T, H·d], k_pool_out, v_pool_out [N, block_size, G·d]
GroupedQueryAttentionInPlace <num_heads, num_kv_heads, head_dim, scale, rotary_interleaved>
    (q, k, v, cos, sin, turn, k_pool, v_pool, block_tables, mask, slot_mapping$blank)
    => (o, k_pool_out, v_pool_out)
{
    heads = Constant <value_ints: ints = @num_heads> ()
    groups = Constant <value_ints: ints = @num_kv_heads> ()
    dim = Constant <value_ints: ints = @head_dim> ()
    copy = Constant <value_ints = [0]> ()
    rest = Constant <value_ints = [-1]> ()
    flat = Constant <value_ints = [0, -1]> ()
    batch = Shape <start = 0, end = 1> (mask)
    tokens = Shape <start = 1, end = 2> (mask)
    keys = Shape <start = 3, end = 4> (mask)

    # New rows [T, G·d].
    k_shape = Concat <axis = 0> (copy, groups, dim)
    k_heads = Reshape (k, k_shape)
    k_rotated = deepseek.Rotary (k_heads, cos, sin, turn)
    k_rows = Reshape (k_rotated, flat)
    $write

    # Queries [B, G, S·R, d].
    q_shape = Concat <axis = 0> (copy, heads, dim)
    q_heads = Reshape (q, q_shape)
    q_rotated = deepseek.Rotary (q_heads, cos, sin, turn)
    token_groups = Concat <axis = 0> (batch, tokens, groups, rest)
    q_tokens = Reshape (q_rotated, token_groups)
    q_groups = Transpose <perm = [0, 2, 1, 3]> (q_tokens)
    group_rows = Concat <axis = 0> (batch, groups, rest, dim)
    query = Reshape (q_groups, group_rows)

    # Cached rows [B, G, M·block_size, d], in the order of the block table.
    row_groups = Concat <axis = 0> (batch, rest, groups, dim)
    k_blocks = Gather <axis = 0> (k_pool_out, block_tables)
    k_cached = Reshape (k_blocks, row_groups)
    k_groups = Transpose <perm = [0, 2, 1, 3]> (k_cached)
    v_blocks = Gather <axis = 0> (v_pool_out, block_tables)
    v_cached = Reshape (v_blocks, row_groups)
    v_groups = Transpose <perm = [0, 2, 1, 3]> (v_cached)

    # Scores [B, G, S·R, keys]; the mask is added in [B, G, S, R, keys].
    scores = com.microsoft.FusedMatMul <transB = 1, alpha: float = @scale> (query, k_groups)
    split_tokens = Concat <axis = 0> (batch, groups, tokens, rest, keys)
    scores_5d = Reshape (scores, split_tokens)
    one = Constant <value_ints = [1]> ()
    mask_5d = Unsqueeze (mask, one)
    scores_float = Cast <to = 1> (scores_5d)
    masked = Add (scores_float, mask_5d)
    softmax = Softmax <axis = -1> (masked)
    shares = CastLike (softmax, q)
    join_tokens = Concat <axis = 0> (batch, groups, rest, keys)
    weights = Reshape (shares, join_tokens)
    $values

    # [B, G, S·R, d] → [T, H·d].
    sum_shape = Concat <axis = 0> (batch, groups, tokens, rest)
    sum_groups = Reshape (sum, sum_shape)
    sum_tokens = Transpose <perm = [0, 2, 1, 3]> (sum_groups)
    width = Mul (heads, dim)
    o_shape = Concat <axis = 0> (rest, width)
    o = Reshape (sum_tokens, o_shape)
}
""")

_TO_LATENT_BY_HEAD = Template("""
    q_nope_flat = Reshape (q_nope, flat)
    q_latent_flat = deepseek.ByHead (q_nope_flat, $w_uk)
    q_latent = Reshape (q_latent_flat, q_shape)
""")
_FROM_LATENT_BY_HEAD = Template("""
    query_tokens = Shape <start = 0, end = 1> (q)
    by_token = Concat <axis = 0> (query_tokens, rest)
    latent_flat = Reshape (latent_sum, by_token)
    o = deepseek.ByHead (latent_flat, $w_uv)
""")
_TO_LATENT = Template("""
    q_nope_by_head = Transpose <perm = [1, 0, 2]> (q_nope)
    q_latent_by_head = $product (q_nope_by_head, $w_uk)
    q_latent = Transpose <perm = [1, 0, 2]> (q_latent_by_head)
""")
_FROM_LATENT = Template("""
    latent_shape = Concat <axis = 0> (rest, heads, copy)
    latent_heads = Reshape (latent_sum, latent_shape)
    latent_by_head = Transpose <perm = [1, 0, 2]> (latent_heads)
    o_by_head = $product (latent_by_head, $w_uv)
    o_heads = Transpose <perm = [1, 0, 2]> (o_by_head)
    o = Reshape (o_heads, flat)
""")
# The products have a factor other than 1, and the values' is taken back by the sum: with a factor
# of 1, MLAS sums a single row in another order than the same row among others, and with one head a
# group and one token a row there is a single one.
_VALUES_BY_HALVES = """
    half = com.microsoft.FusedMatMul <alpha = 0.5> (weights, v_groups)
    sum = Add (half, half)
"""


def cpu_attention(num_heads: int) -> tuple[str, ...]:
    """Return the functions of attention on the CPU for a model with `num_heads` heads."""
    w_uk, w_uv = _names("w_uk", num_heads), _names("w_uv", num_heads)
    in_place = "pool = ScatterND (kv_pool, slot_mapping, kv_rows)"
    latent = LATENT_IN_PLACE.substitute(
        portable="LatentAttention",
        differences="H weights w_uk [nope, rank], H weights w_uv [rank, v];",
        w_uk=w_uk,
        w_uv=w_uv,
        blank="",
        write=in_place,
        to_latent=_TO_LATENT_BY_HEAD.substitute(w_uk=w_uk),
        from_latent=_FROM_LATENT_BY_HEAD.substitute(w_uv=w_uv),
    )
    w_uk, w_uv = "w_uk, w_uk_scales", "w_uv, w_uv_scales"
    latent_int8 = LATENT_IN_PLACE.substitute(
        portable="LatentAttentionInt8",
        differences="w_uk [H, nope, rank] and w_uv [H, rank, v] UINT8, their scales [H, 1, …];",
        w_uk=w_uk,
        w_uv=w_uv,
        blank="",
        write=in_place,
        to_latent=_TO_LATENT.substitute(product="deepseek.ByHeadInt8", w_uk=w_uk),
        from_latent=_FROM_LATENT.substitute(product="deepseek.ByHeadInt8", w_uv=w_uv),
    )
    grouped = GROUPED_QUERY_IN_PLACE.substitute(
        differences="all else float32;",
        blank="",
        write="""
    k_pool_out = ScatterND (k_pool, slot_mapping, k_rows)
    v_pool_out = ScatterND (v_pool, slot_mapping, v)
""",
        values=_VALUES_BY_HALVES,
    )
    return (MASK_IN_PLACE, _by_head(num_heads), BY_HEAD_INT8, latent, latent_int8, grouped)


def cuda_attention() -> tuple[str, ...]:
    """Return the functions of attention on CUDA, for any number of heads and any precision."""
    blank = "on CUDA [T + Z, W, 3], of each number; blank [Z, W] zeros for the last Z slots;"
    latent = LATENT_IN_PLACE.substitute(
        portable="LatentAttention",
        differences=blank,
        w_uk="w_uk",
        w_uv="w_uv",
        blank=", blank",
        write="""
    all_rows = Concat <axis = 0> (kv_rows, blank)
    pool = ScatterND (kv_pool, slot_mapping, all_rows)
""",
        to_latent=_TO_LATENT.substitute(product="MatMul", w_uk="w_uk"),
        from_latent=_FROM_LATENT.substitute(product="MatMul", w_uv="w_uv"),
    )
    grouped = GROUPED_QUERY_IN_PLACE.substitute(
        differences=blank,
        blank=", blank",
        write="""
    all_k_rows = Concat <axis = 0> (k_rows, blank)
    all_v_rows = Concat <axis = 0> (v, blank)
    k_pool_out = ScatterND (k_pool, slot_mapping, all_k_rows)
    v_pool_out = ScatterND (v_pool, slot_mapping, all_v_rows)
""",
        values="sum = MatMul (weights, v_groups)",
    )
    return (MASK_IN_PLACE, latent, grouped)


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
