"""Attention over paged KV pools: latent and grouped-query."""

from __future__ import annotations

# −1e30 rather than −inf: a padding row is masked everywhere, and must not turn into NaN.
ATTENTION_MASK = """
# Additive mask of a step, the same for every layer and head: 0 where a query may look, else −1e30.
# Keys are the M·block_size cached slots, then the S new tokens. A key is visible if its position is
# at most the query's; unused slots and padding (position −1) get a position beyond all others.
#   positions [B, S], context_lens [B], block_tables [B, M] int32
#   → mask [B, S, 1, M·block_size+S] float32
AttentionMask <block_size> (positions, context_lens, block_tables) => (mask) {
    zero = Constant <value = int32 {0}> ()
    one = Constant <value = int32 {1}> ()
    never = Constant <value = int32 {2147483647}> ()
    last_axis = Constant <value_ints = [-1]> ()
    tail_axes = Constant <value_ints = [2, 3]> ()
    middle_axes = Constant <value_ints = [1, 2]> ()

    block = Constant <value_ints: ints = @block_size> ()
    blocks = Shape <start = 1, end = 2> (block_tables)
    slots = Mul (blocks, block)
    slots_0d = Squeeze (slots)
    slots_int32 = Cast <to = 6> (slots_0d)
    slot = Range (zero, slots_int32, one)
    context = Unsqueeze (context_lens, last_axis)
    filled = Less (slot, context)
    cached_position = Where (filled, slot, never)

    padding = Less (positions, zero)
    new_position = Where (padding, never, positions)

    key_position = Concat <axis = 1> (cached_position, new_position)
    key = Unsqueeze (key_position, middle_axes)
    query = Unsqueeze (positions, tail_axes)
    visible = LessOrEqual (key, query)
    open = Constant <value_float = 0.0> ()
    closed = Constant <value_float = -1e30> ()
    mask = Where (visible, open, closed)
}
"""

# Queries of a row are ordered [S, H], so that the whole step needs no transposition but the two
# around each per-head weight. Cached rows are used whole as values and cut after the product:
# cheaper than copying their first kv_lora_rank columns.
LATENT_ATTENTION = """
# Latent attention in its absorbed form: a query is taken into the latent space by W_UK, so that one
# cached row of W numbers serves every head, and the output comes back by W_UV.
# Scores of cached and new rows are computed apart and share one float32 softmax.
#   q [T, H·(nope+rope)], kv_a [T, W], kv_norm [rank], w_uk [H, nope, rank], w_uv [H, rank, v],
#   cos, sin [T, 1, rope] float32, turn [rope, rope], kv_pool [N, block_size, W] (all finite),
#   block_tables [B, M ≥ 1] int32, mask [B, S, 1, M·block_size+S] float32
#   → o [T, H·v], new_kv [B, S, W]
# qk_head_dims = [nope, rope]; latent_dims = [rank, rope]; epsilon is kv_norm's.
# rotary_interleaved tells a replacement how turn pairs dimensions; the body needs turn alone.
LatentAttention
    <num_heads, qk_head_dims, latent_dims, v_head_dim, scale, epsilon, rotary_interleaved>
    (q, kv_a, kv_norm, w_uk, w_uv, cos, sin, turn, kv_pool, block_tables, mask) => (o, new_kv)
{
    heads = Constant <value_ints: ints = @num_heads> ()
    qk_sizes = Constant <value_ints: ints = @qk_head_dims> ()
    latent_sizes = Constant <value_ints: ints = @latent_dims> ()
    width = ReduceSum <keepdims = 1> (latent_sizes)
    copy = Constant <value_ints = [0]> ()
    rest = Constant <value_ints = [-1]> ()
    batch = Shape <start = 0, end = 1> (block_tables)
    by_row = Concat <axis = 0> (batch, rest, copy)

    # New rows [B, S, W]: the normed latent, then the key part that all heads share, rotated.
    one_head = Constant <value_ints = [0, 1, -1]> ()
    kv = Reshape (kv_a, one_head)
    latent, k_rope = Split <axis = -1> (kv, latent_sizes)
    latent_normed = deepseek.RMSNorm <epsilon: float = @epsilon> (latent, kv_norm)
    k_rotated = deepseek.Rotary (k_rope, cos, sin, turn)
    kv_rows = Concat <axis = -1> (latent_normed, k_rotated)
    new_kv = Reshape (kv_rows, by_row)

    # Queries [B, S·H, W] in the latent space.
    q_shape = Concat <axis = 0> (copy, heads, rest)
    q_heads = Reshape (q, q_shape)
    q_nope, q_rope = Split <axis = -1> (q_heads, qk_sizes)
    q_nope_by_head = Transpose <perm = [1, 0, 2]> (q_nope)
    q_latent_by_head = MatMul (q_nope_by_head, w_uk)
    q_latent = Transpose <perm = [1, 0, 2]> (q_latent_by_head)
    q_rotated = deepseek.Rotary (q_rope, cos, sin, turn)
    q_rows = Concat <axis = -1> (q_latent, q_rotated)
    scale_float = Constant <value_float: float = @scale> ()
    scale_like = CastLike (scale_float, q)
    q_scaled = Mul (q_rows, scale_like)
    query = Reshape (q_scaled, by_row)

    # Cached rows [B, M·block_size, W], in the order of the block table.
    blocks = Gather <axis = 0> (kv_pool, block_tables)
    cached_shape = Concat <axis = 0> (copy, rest, width)
    cached = Reshape (blocks, cached_shape)

    # Scores [B, S·H, keys]; the mask is added in [B, S, H, keys].
    cached_t = Transpose <perm = [0, 2, 1]> (cached)
    cached_scores = MatMul (query, cached_t)
    new_t = Transpose <perm = [0, 2, 1]> (new_kv)
    new_scores = MatMul (query, new_t)
    scores = Concat <axis = -1> (cached_scores, new_scores)
    tokens = Shape <start = 1, end = 2> (mask)
    keys = Shape <start = 3, end = 4> (mask)
    split_heads = Concat <axis = 0> (copy, tokens, heads, rest)
    join_heads = Concat <axis = 0> (copy, rest, keys)
    scores_4d = Reshape (scores, split_heads)
    scores_float = Cast <to = 1> (scores_4d)
    masked = Add (scores_float, mask)
    softmax = Softmax <axis = -1> (masked)
    softmax_like = CastLike (softmax, q)
    weights = Reshape (softmax_like, join_heads)

    cached_keys = Sub (keys, tokens)
    key_sizes = Concat <axis = 0> (cached_keys, tokens)
    cached_weights, new_weights = Split <axis = -1> (weights, key_sizes)
    cached_sum = MatMul (cached_weights, cached)
    new_sum = MatMul (new_weights, new_kv)
    sum = Add (cached_sum, new_sum)
    latent_sum, unused_rope = Split <axis = -1> (sum, latent_sizes)

    # Back from the latent space: [T, H, rank] → [T, H·v].
    latent_shape = Concat <axis = 0> (rest, heads, copy)
    latent_heads = Reshape (latent_sum, latent_shape)
    latent_by_head = Transpose <perm = [1, 0, 2]> (latent_heads)
    o_by_head = MatMul (latent_by_head, w_uv)
    o_heads = Transpose <perm = [1, 0, 2]> (o_by_head)
    flat = Constant <value_ints = [0, -1]> ()
    o = Reshape (o_heads, flat)
}
"""

# Every group is a product of its own, [S·R, d] x [d, keys]: R = H / G heads share a key.
GROUPED_QUERY_ATTENTION = """
# Grouped-query attention (arXiv 2305.13245) over cached and new tokens: head h reads the keys and
# values of group h·G/H. Scores with the two kinds of keys are computed apart and joined for one
# softmax.
#   q [T, H·d], k, v [T, G·d], cos, sin [T, 1, d] float32, turn [d, d],
#   k_pool, v_pool [N, block_size, G·d] (all finite; keys are rotated),
#   block_tables [B, M ≥ 1] int32, mask [B, S, 1, M·block_size+S] float32
#   → o [T, H·d], new_k, new_v [B, S, G·d]
# rotary_interleaved tells a replacement how turn pairs dimensions; the body needs turn alone.
GroupedQueryAttention <num_heads, num_kv_heads, head_dim, scale, rotary_interleaved>
    (q, k, v, cos, sin, turn, k_pool, v_pool, block_tables, mask) => (o, new_k, new_v)
{
    heads = Constant <value_ints: ints = @num_heads> ()
    groups = Constant <value_ints: ints = @num_kv_heads> ()
    dim = Constant <value_ints: ints = @head_dim> ()
    copy = Constant <value_ints = [0]> ()
    rest = Constant <value_ints = [-1]> ()
    batch = Shape <start = 0, end = 1> (mask)
    tokens = Shape <start = 1, end = 2> (mask)
    keys = Shape <start = 3, end = 4> (mask)

    # New rows [B, S, G·d].
    by_row = Concat <axis = 0> (batch, tokens, rest)
    k_shape = Concat <axis = 0> (copy, groups, dim)
    k_heads = Reshape (k, k_shape)
    k_rotated = deepseek.Rotary (k_heads, cos, sin, turn)
    new_k = Reshape (k_rotated, by_row)
    new_v = Reshape (v, by_row)

    # Queries [B, G, S·R, d].
    q_shape = Concat <axis = 0> (copy, heads, dim)
    q_heads = Reshape (q, q_shape)
    q_rotated = deepseek.Rotary (q_heads, cos, sin, turn)
    scale_float = Constant <value_float: float = @scale> ()
    scale_like = CastLike (scale_float, q)
    q_scaled = Mul (q_rotated, scale_like)
    token_groups = Concat <axis = 0> (batch, tokens, groups, rest)
    q_tokens = Reshape (q_scaled, token_groups)
    q_groups = Transpose <perm = [0, 2, 1, 3]> (q_tokens)
    group_rows = Concat <axis = 0> (batch, groups, rest, dim)
    query = Reshape (q_groups, group_rows)

    # Keys [B, G, d, n] and values [B, G, n, d] of the n cached and the n = S new tokens.
    row_groups = Concat <axis = 0> (batch, rest, groups, dim)
    k_blocks = Gather <axis = 0> (k_pool, block_tables)
    k_cached = Reshape (k_blocks, row_groups)
    k_cached_t = Transpose <perm = [0, 2, 3, 1]> (k_cached)
    v_blocks = Gather <axis = 0> (v_pool, block_tables)
    v_cached = Reshape (v_blocks, row_groups)
    v_cached_groups = Transpose <perm = [0, 2, 1, 3]> (v_cached)
    k_new = Reshape (k_rotated, row_groups)
    k_new_t = Transpose <perm = [0, 2, 3, 1]> (k_new)
    v_new = Reshape (v, row_groups)
    v_new_groups = Transpose <perm = [0, 2, 1, 3]> (v_new)

    # Scores [B, G, S·R, keys]; the mask is added in [B, G, S, R, keys].
    cached_scores = MatMul (query, k_cached_t)
    new_scores = MatMul (query, k_new_t)
    scores = Concat <axis = -1> (cached_scores, new_scores)
    split_tokens = Concat <axis = 0> (batch, groups, tokens, rest, keys)
    scores_5d = Reshape (scores, split_tokens)
    scores_float = Cast <to = 1> (scores_5d)
    one = Constant <value_ints = [1]> ()
    mask_5d = Unsqueeze (mask, one)
    masked = Add (scores_float, mask_5d)
    softmax = Softmax <axis = -1> (masked)
    softmax_like = CastLike (softmax, q)
    join_tokens = Concat <axis = 0> (batch, groups, rest, keys)
    weights = Reshape (softmax_like, join_tokens)

    cached_keys = Sub (keys, tokens)
    key_sizes = Concat <axis = 0> (cached_keys, tokens)
    cached_weights, new_weights = Split <axis = -1> (weights, key_sizes)
    cached_sum = MatMul (cached_weights, v_cached_groups)
    new_sum = MatMul (new_weights, v_new_groups)
    sum = Add (cached_sum, new_sum)

    # [B, G, S·R, d] → [T, H·d].
    sum_shape = Concat <axis = 0> (batch, groups, tokens, rest)
    sum_groups = Reshape (sum, sum_shape)
    sum_tokens = Transpose <perm = [0, 2, 1, 3]> (sum_groups)
    width = Mul (heads, dim)
    flat = Concat <axis = 0> (rest, width)
    o = Reshape (sum_tokens, flat)
}
"""

ATTENTION_FUNCTIONS = (ATTENTION_MASK, LATENT_ATTENTION, GROUPED_QUERY_ATTENTION)
