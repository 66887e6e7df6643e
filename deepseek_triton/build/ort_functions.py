"""DeepSeek's operators for ONNX Runtime's CPU kernels, in place of the portable bodies.

They keep the conventions of export/functions; `com.microsoft` is ONNX Runtime's own domain.

A token's numbers must not depend on its company, down to the last bit: then a request gives the
same text alone and under load. ONNX Runtime's products sum in another order when they have a single
row and an unpacked right side, or at most 64 columns a thread. So
- the weights of each latent head are a constant of their own, which is packed (ByHead);
- no expert computes a single token (ExtraRows);
- no product of grouped-query attention takes the path for a single row (ort_attention.py);
- the runner keeps attention's columns above 64 (runner/ort_shapes.py).
This costs about 10% of a decode step.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from deepseek_triton.build.ort_attention import attention_texts
from deepseek_triton.build.ort_int4 import EXPERTS_INT4_SPARSE
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
    texts = (*attention_texts(num_heads), EXTRA_ROWS, EXPERTS_SPARSE, EXPERTS_INT4_SPARSE)
    for function in map(define_function, texts):
        function.opset_import.add(domain=CONTRIB_DOMAIN, version=CONTRIB_VERSION)
        library[function.name] = function
    return library
