"""DeepSeek's operators for ONNX Runtime's kernels, in place of the portable bodies.

They keep the conventions of export/functions; `com.microsoft` is ONNX Runtime's own domain.

On the CPU a token's numbers must not depend on its company, down to the last bit: then a request
gives the same text alone and under load. ONNX Runtime's products sum in another order when they
have a single row and an unpacked right side, or at most 64 columns a thread. So
- the weights of each latent head are a constant of their own, which is packed (ByHead);
- no expert computes a single token (ExtraRows);
- no INT4 product has an odd number of rows (EvenRows);
- no product of grouped-query attention takes the path for a single row (ort_attention.py);
- the runner keeps attention's columns above 64 (runner/ort_shapes.py).
This costs about 10% of a decode step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from string import Template

import onnx

from deepseek_triton.build.ort_attention import cpu_attention, cuda_attention
from deepseek_triton.export.functions import define_function

CONTRIB_DOMAIN = "com.microsoft"
CONTRIB_VERSION = 1

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

EVEN_ROWS = """
# What ort_even_rows.py pads an odd number of rows with.
#   input_ids [B, S] → padding [4] of [T, K] to an even T, begin [1] = 0, tokens [1] = T
EvenRows (input_ids) => (padding, begin, tokens) {
    vector = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    before = Constant <value_ints = [0, 0]> ()
    total = Size (input_ids)
    tokens = Reshape (total, vector)
    odd = Mod (tokens, two)
    begin = Constant <value_ints = [0]> ()
    padding = Concat <axis = 0> (before, odd, begin)
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


# One-hot probabilities choose a row's expert; normalised, its weight is 1. Casts are for CUDA,
# where x is of half precision: the sum is taken in float32 there as well.
EXPERTS_BY_ROW = Template("""
# $portable through ONNX Runtime's kernel. A row of it is a token with one of its experts, so the
# sum over a token's experts is taken in their order, whatever other tokens there are.
#   $shapes; the rest as $portable → y [T, D]
${portable}Sparse <$attributes>
    (x, expert_ids, expert_weights, $weights) => (y)
{
    one = Constant <value_ints = [1]> ()
    last = Constant <value_ints = [-1]> ()
    k = Constant <value_ints: ints = @top_k> ()
    width = Shape <start = 1, end = 2> (x)
    x_3d = Unsqueeze (x, one)
    repeats = Concat <axis = 0> (one, k, one)
    x_by_expert = Tile (x_3d, repeats)
    rows_shape = Concat <axis = 0> (last, width)
    rows = Reshape (x_by_expert, rows_shape)
    ids = Reshape (expert_ids, last)
    experts = Constant <value_ints: ints = @num_experts> ()
    off_on = Constant <value_floats = [0.0, 1.0]> ()
    one_hot = OneHot <axis = -1> (ids, experts, off_on)
    chosen = CastLike (one_hot, x)
    $join
    ${all}outputs = com.microsoft.$kernel <
        k = 1, activation_type = "swiglu", swiglu_fusion = 1, activation_alpha = 1.0,
        activation_beta = 0.0, $settings
    > (${all}rows, ${all}chosen, $inputs)
    $part
    outputs_float = Cast <to = 1> (outputs)
    by_token = Concat <axis = 0> (last, k, width)
    outputs_3d = Reshape (outputs_float, by_token)
    $sum
    y = CastLike (sum, x)
}
""")
# For the same reason as EvenRows.
_EVEN_ROWS = {
    "all": "all_",
    "join": """
    # An expert with an odd number of rows gets a further one, of zeros.
    first = Constant <value_ints = [0]> ()
    two = Constant <value_float = 2.0> ()
    counts = ReduceSum <keepdims = 0> (chosen, first)
    remainders = Mod <fmod = 1> (counts, two)
    odd = Cast <to = 9> (remainders)
    square = Concat <axis = 0> (experts, experts)
    blank = ConstantOfShape <value = float[1] {0.0}> (square)
    identity = EyeLike (blank)
    more_chosen = Compress <axis = 0> (identity, odd)
    all_chosen = Concat <axis = 0> (chosen, more_chosen)
    more = Shape <start = 0, end = 1> (more_chosen)
    before = Constant <value_ints = [0, 0]> ()
    padding = Concat <axis = 0> (before, more, first)
    all_rows = Pad (rows, padding)""",
    "part": """
    own = Shape <start = 0, end = 1> (rows)
    outputs = Slice (all_outputs, first, own)""",
}
_ROWS_AS_THEY_ARE = {"all": "", "join": "", "part": ""}
_SUM_CPU = """
    weights = Unsqueeze (expert_weights, last)
    weighted = Mul (outputs_3d, weights)
    sum = ReduceSum <keepdims = 0> (weighted, one)
"""
_SUM_CUDA = """
    weights = Unsqueeze (expert_weights, one)
    sum_3d = MatMul (weights, outputs_3d)
    sum = Squeeze (sum_3d, one)
"""
_INT4 = {
    "portable": "ExpertsInt4",
    "shapes": "gate_up UINT8 [E, 2·F, D/2], down UINT8 [E, D, F/2], "
    "zero points UINT8 [E, …, ceil(G/2)] or absent",
    "weights": "gate_up, gate_up_scales, gate_up_zeros, down, down_scales, down_zeros",
    "kernel": "QMoE",
}
_INT4_INPUTS = "gate_up, gate_up_scales, , down, down_scales, , , , , gate_up_zeros, down_zeros"
_INT4_SETTINGS = "expert_weight_bits = 4, block_size: int = @block_size"

EXPERTS_INT4_CPU = EXPERTS_BY_ROW.substitute(
    _INT4 | _EVEN_ROWS,
    attributes="num_experts, top_k, block_size, accuracy_level",
    settings=f"normalize_routing_weights = 0, {_INT4_SETTINGS}, "
    "accuracy_level: int = @accuracy_level",
    inputs=f"{_INT4_INPUTS}, , all_chosen",
    sum=_SUM_CPU,
)
EXPERTS_INT4_CUDA = EXPERTS_BY_ROW.substitute(
    _INT4 | _ROWS_AS_THEY_ARE,
    attributes="num_experts, top_k, block_size",
    settings=f'normalize_routing_weights = 1, {_INT4_SETTINGS}, quant_type = "int", '
    "weights_prepacked = 0",
    inputs=_INT4_INPUTS,
    sum=_SUM_CUDA,
)
EXPERTS_CUDA = EXPERTS_BY_ROW.substitute(
    _ROWS_AS_THEY_ARE,
    portable="Experts",
    shapes="gate_up [E, 2·F, D], down [E, D, F]",
    attributes="num_experts, top_k",
    weights="gate_up, down",
    kernel="MoE",
    settings="normalize_routing_weights = 1",
    inputs="gate_up, , down",
    sum=_SUM_CUDA,
)
# Shape rather than Size, for which a CPU node would wait inside the recording of a CUDA graph.
# One thread of ScatterND's kernel copies what one index names: a number here, where it would be a
# row of hundreds.
BLANK_ROWS = """
# What the layers share when they write into their pools: zeros for the slots that a step clears,
# those of slot_mapping after the ones of the T tokens, and the index of each number of all rows.
#   input_ids [B, S], slot_mapping [T + Z, 2], pool [N, block_size, W]
#   → blank [Z, W], index [T + Z, W, 3]
BlankRows (input_ids, slot_mapping, pool) => (blank, index) {
    flat = Constant <value_ints = [-1]> ()
    begin = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    ids = Reshape (input_ids, flat)
    tokens = Shape <start = 0, end = 1> (ids)
    slots = Shape <start = 0, end = 1> (slot_mapping)
    count = Sub (slots, tokens)
    width = Shape <start = 2, end = 3> (pool)
    shape = Concat <axis = 0> (count, width)
    zeros = ConstantOfShape <value = float[1] {0.0}> (shape)
    blank = CastLike (zeros, pool)

    first = Squeeze (begin)
    step = Squeeze (one)
    end = Squeeze (width)
    column = Range (first, end, step)
    column_shape = Concat <axis = 0> (one, width, one)
    column_3d = Reshape (column, column_shape)
    columns_shape = Concat <axis = 0> (slots, width, one)
    columns = Expand (column_3d, columns_shape)
    slot_3d = Unsqueeze (slot_mapping, one)
    rows_shape = Concat <axis = 0> (slots, width, two)
    rows = Expand (slot_3d, rows_shape)
    index = Concat <axis = -1> (rows, columns)
}
"""

# Kernels of other reductions would need cuDNN.
BEST_TOKENS = """
# The likeliest tokens of each row, and the sum of all exponentials relative to the first one's: its
# log probability is −log(total).
#   logits [R, V] float32 → values [R, count] descending, ids [R, count] int64, total [R, 1]
BestTokens <count> (logits) => (values, ids, total) {
    k = Constant <value_ints: ints = @count> ()
    values, ids = TopK <axis = -1> (logits, k)
    begin = Constant <value_ints = [0]> ()
    last = Constant <value_ints = [-1]> ()
    end = Constant <value_ints = [1]> ()
    first = Slice (values, begin, end, last)
    below = Sub (logits, first)
    weights = Exp (below)
    total = ReduceSum <keepdims = 1> (weights, last)
}
"""


def cpu_functions(num_heads: int) -> Mapping[str, onnx.FunctionProto]:
    """Return the functions for the CPU by name, for a model with `num_heads` attention heads."""
    return _library(
        (*cpu_attention(num_heads), EXTRA_ROWS, EVEN_ROWS, EXPERTS_SPARSE, EXPERTS_INT4_CPU)
    )


def cuda_functions() -> Mapping[str, onnx.FunctionProto]:
    """Return the functions for CUDA by name."""
    return _library((*cuda_attention(), BEST_TOKENS, BLANK_ROWS, EXPERTS_CUDA, EXPERTS_INT4_CUDA))


def _library(texts: Iterable[str]) -> dict[str, onnx.FunctionProto]:
    library = {}
    for function in map(define_function, texts):
        function.opset_import.add(domain=CONTRIB_DOMAIN, version=CONTRIB_VERSION)
        library[function.name] = function
    return library
