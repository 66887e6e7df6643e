"""The routed experts of a layer."""

from __future__ import annotations

# Weights stay on the left of each product and so need no transposition.
EXPERTS = """
# Weighted sum of the chosen experts' gated MLPs. The body computes every expert for every token and
# is a reference; a target that can should run the chosen ones only.
# gate_up interleaves the rows of the two projections: gate 0, up 0, gate 1, up 1, ...
#   x [T, D], expert_ids [T, K] int64, expert_weights [T, K] float32, gate_up [E, 2·F, D],
#   down [E, D, F] → y [T, D]
Experts <num_experts, top_k> (x, expert_ids, expert_weights, gate_up, down) => (y) {
    x_t = Transpose <perm = [1, 0]> (x)
    both = MatMul (gate_up, x_t)
    experts = Constant <value_ints: ints = @num_experts> ()
    tokens = Shape <start = 0, end = 1> (x)
    rest = Constant <value_ints = [-1]> ()
    two = Constant <value_ints = [2]> ()
    pairs = Concat <axis = 0> (experts, rest, two, tokens)
    paired = Reshape (both, pairs)
    gate_4d, up_4d = Split <axis = 2, num_outputs = 2> (paired)
    gate = Squeeze (gate_4d, two)
    up = Squeeze (up_4d, two)
    sigmoid = Sigmoid (gate)
    silu = Mul (gate, sigmoid)
    hidden = Mul (silu, up)
    out_by_expert = MatMul (down, hidden)

    dense_shape = Concat <axis = 0> (tokens, experts)
    zeros = ConstantOfShape <value = float[1] {0.0}> (dense_shape)
    dense_weights = ScatterElements <axis = 1> (zeros, expert_ids, expert_weights)
    weights_by_expert = Transpose <perm = [1, 0]> (dense_weights)
    one = Constant <value_ints = [1]> ()
    weights_3d = Unsqueeze (weights_by_expert, one)
    out_float = Cast <to = 1> (out_by_expert)
    weighted = Mul (out_float, weights_3d)
    first = Constant <value_ints = [0]> ()
    sum_t = ReduceSum <keepdims = 0> (weighted, first)
    sum = Transpose <perm = [1, 0]> (sum_t)
    y = CastLike (sum, x)
}
"""

EXPERTS_INT4 = """
# Experts with 4-bit codes; see LinearInt4. Both projections have groups of group_size inputs.
#   x [T, D], expert_ids [T, K] int64, expert_weights [T, K] float32,
#   gate_up UINT4 [E, 2·F, D], gate_up_scales [E, 2·F, Gd], gate_up_zeros UINT4 [E, 2·F, Gd],
#   down UINT4 [E, D, F], down_scales [E, D, Gf], down_zeros UINT4 [E, D, Gf] → y [T, D]
ExpertsInt4 <num_experts, top_k, group_size, symmetric>
    (x, expert_ids, expert_weights, gate_up, gate_up_scales, gate_up_zeros,
     down, down_scales, down_zeros) => (y)
{
    gate_up_dense = DequantizeLinear <axis = 2, block_size: int = @group_size>
        (gate_up, gate_up_scales, gate_up_zeros)
    down_dense = DequantizeLinear <axis = 2, block_size: int = @group_size>
        (down, down_scales, down_zeros)
    y = deepseek.Experts <num_experts: ints = @num_experts, top_k: ints = @top_k>
        (x, expert_ids, expert_weights, gate_up_dense, down_dense)
}
"""

EXPERT_FUNCTIONS = (EXPERTS, EXPERTS_INT4)
