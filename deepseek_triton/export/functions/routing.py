"""How a token picks its experts: DeepSeek-V2's softmax and DeepSeek-V3's biased sigmoid.

All take logits [T, E] float32 and give expert_ids [T, K] int64, expert_weights [T, K] float32.
"""

from __future__ import annotations

ROUTE_SOFTMAX = """
# DeepSeek-V2-Lite (arXiv 2405.04434, eq. 20–22): the top_k most probable experts, not renormalised.
#   logits [T, E] → expert_ids [T, K] int64, expert_weights [T, K]
RouteSoftmax <top_k, scaling_factor> (logits) => (expert_ids, expert_weights) {
    scores = Softmax <axis = -1> (logits)
    k = Constant <value_ints: ints = @top_k> ()
    chosen, expert_ids = TopK <axis = -1> (scores, k)
    factor = Constant <value_float: float = @scaling_factor> ()
    expert_weights = Mul (chosen, factor)
}
"""

# TopK rather than ReduceMax, for which ONNX Runtime's CUDA provider would need cuDNN.
ROUTE_SOFTMAX_GROUPED = """
# DeepSeek-V2 (arXiv 2405.04434, section 2.2.2): as RouteSoftmax, but only among the top_groups
# groups with the best single expert; the scores of the other groups count as 0.
#   logits [T, E] → expert_ids [T, K] int64, expert_weights [T, K]
RouteSoftmaxGrouped <top_k, num_groups, top_groups, scaling_factor>
    (logits) => (expert_ids, expert_weights)
{
    scores = Softmax <axis = -1> (logits)
    last = Constant <value_ints = [-1]> ()
    copy = Constant <value_ints = [0]> ()
    groups = Constant <value_ints: ints = @num_groups> ()
    by_group = Concat <axis = 0> (copy, groups, last)
    grouped = Reshape (scores, by_group)
    one = Constant <value_ints = [1]> ()
    best_one, unused_ids = TopK <axis = -1> (grouped, one)
    group_scores = Squeeze (best_one, last)
    kept = deepseek.KeepGroups <top_groups: ints = @top_groups> (group_scores)
    zero = Constant <value_float = 0.0> ()
    limited = Where (kept, grouped, zero)
    flat = Constant <value_ints = [0, -1]> ()
    choice = Reshape (limited, flat)
    k = Constant <value_ints: ints = @top_k> ()
    chosen, expert_ids = TopK <axis = -1> (choice, k)
    factor = Constant <value_float: float = @scaling_factor> ()
    expert_weights = Mul (chosen, factor)
}
"""

ROUTE_SIGMOID = """
# DeepSeek-V3 (arXiv 2412.19437, eq. 12–16) with one group: sigmoid scores, a bias that counts for
# the choice but not for the weights. normalize is 1 or 0: divide by the chosen weights' sum or not.
#   logits [T, E], bias [E] → expert_ids [T, K] int64, expert_weights [T, K]
RouteSigmoid <top_k, scaling_factor, normalize> (logits, bias) => (expert_ids, expert_weights) {
    scores = Sigmoid (logits)
    choice = Add (scores, bias)
    k = Constant <value_ints: ints = @top_k> ()
    unused_scores, expert_ids = TopK <axis = -1> (choice, k)
    expert_weights = deepseek.ExpertWeights
        <scaling_factor: float = @scaling_factor, normalize: float = @normalize>
        (scores, expert_ids)
}
"""

ROUTE_SIGMOID_GROUPED = """
# DeepSeek-V3: as RouteSigmoid, but only among the top_groups groups with the largest sum of their
# two best biased scores.
#   logits [T, E], bias [E] → expert_ids [T, K] int64, expert_weights [T, K]
RouteSigmoidGrouped <top_k, num_groups, top_groups, scaling_factor, normalize>
    (logits, bias) => (expert_ids, expert_weights)
{
    scores = Sigmoid (logits)
    biased = Add (scores, bias)
    last = Constant <value_ints = [-1]> ()
    copy = Constant <value_ints = [0]> ()
    groups = Constant <value_ints: ints = @num_groups> ()
    by_group = Concat <axis = 0> (copy, groups, last)
    grouped = Reshape (biased, by_group)
    two = Constant <value_ints = [2]> ()
    best_two, unused_ids = TopK <axis = -1> (grouped, two)
    group_scores = ReduceSum <keepdims = 0> (best_two, last)
    kept = deepseek.KeepGroups <top_groups: ints = @top_groups> (group_scores)
    never = Constant <value_float = -1e30> ()
    limited = Where (kept, grouped, never)
    flat = Constant <value_ints = [0, -1]> ()
    choice = Reshape (limited, flat)
    k = Constant <value_ints: ints = @top_k> ()
    unused_scores, expert_ids = TopK <axis = -1> (choice, k)
    expert_weights = deepseek.ExpertWeights
        <scaling_factor: float = @scaling_factor, normalize: float = @normalize>
        (scores, expert_ids)
}
"""

KEEP_GROUPS = """
# Which expert groups a token may use: exactly top_groups of them, also when scores tie.
#   group_scores [T, G] → kept [T, G, 1] bool
KeepGroups <top_groups> (group_scores) => (kept) {
    k = Constant <value_ints: ints = @top_groups> ()
    unused_scores, group_ids = TopK <axis = -1> (group_scores, k)
    all_shape = Shape (group_scores)
    zeros = ConstantOfShape <value = float[1] {0.0}> (all_shape)
    top_shape = Shape (group_ids)
    ones = ConstantOfShape <value = float[1] {1.0}> (top_shape)
    marked = ScatterElements <axis = 1> (zeros, group_ids, ones)
    last = Constant <value_ints = [-1]> ()
    column = Unsqueeze (marked, last)
    kept = Cast <to = 9> (column)
}
"""

# normalize is an exponent, since a body cannot branch on an attribute: x¹ = x, x⁰ = 1.
EXPERT_WEIGHTS = """
# Weights of the chosen experts: scores / (their sum + 1e−20)^normalize · scaling_factor.
#   scores [T, E], expert_ids [T, K] int64 → expert_weights [T, K]
ExpertWeights <scaling_factor, normalize> (scores, expert_ids) => (expert_weights) {
    chosen = GatherElements <axis = 1> (scores, expert_ids)
    last = Constant <value_ints = [-1]> ()
    sum = ReduceSum <keepdims = 1> (chosen, last)
    tiny = Constant <value_float = 1e-20> ()
    positive = Add (sum, tiny)
    exponent = Constant <value_float: float = @normalize> ()
    divisor = Pow (positive, exponent)
    share = Div (chosen, divisor)
    factor = Constant <value_float: float = @scaling_factor> ()
    expert_weights = Mul (share, factor)
}
"""

ROUTING_FUNCTIONS = (
    ROUTE_SOFTMAX,
    ROUTE_SOFTMAX_GROUPED,
    ROUTE_SIGMOID,
    ROUTE_SIGMOID_GROUPED,
    KEEP_GROUPS,
    EXPERT_WEIGHTS,
)
