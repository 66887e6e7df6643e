"""DeepSeek's operators for TensorRT, in place of the portable bodies; standard operators only.

They keep the conventions of export/functions.
"""

from __future__ import annotations

import onnx

from deepseek_triton.export.functions import define_function

# TensorRT keeps a weight at 4 bits when DequantizeLinear feeds the right side of a product and has
# no zero point; with the weight on the left its parser passes and its builder crashes (RTX 1.7).
LINEAR_INT4_SIGNED = """
# Linear layer with signed 4-bit codes, blocks of block_size along K.
#   x [T, K], codes INT4 [N, K], scales [N, K/block_size] → y [T, N]
LinearInt4Signed <block_size> (x, codes, scales) => (y) {
    weight = DequantizeLinear <axis = 1, block_size: int = @block_size> (codes, scales)
    y = Gemm <transB = 1> (x, weight)
}
"""

# With q the code and z the zero point: x @ ((q − z)·s) = x @ ((q − 8)·s) + x @ ((8 − z)·s). The
# last factor is constant over a block, so x is summed over the block first.
LINEAR_INT4_SHIFTED = """
# As LinearInt4Signed, with a zero point for each block: shifts = (8 − zero point) · scale.
#   x [T, K], codes INT4 [N, K], scales, shifts [N, G] → y [T, N]     (G = K/block_size)
LinearInt4Shifted <block_size, blocks> (x, codes, scales, shifts) => (y) {
    weight = DequantizeLinear <axis = 1, block_size: int = @block_size> (codes, scales)
    copy = Constant <value_ints = [0]> ()
    last = Constant <value_ints = [-1]> ()
    groups = Constant <value_ints: ints = @blocks> ()
    by_block_shape = Concat <axis = 0> (copy, groups, last)
    by_block = Reshape (x, by_block_shape)
    by_block_float = Cast <to = 1> (by_block)
    sums_float = ReduceSum <keepdims = 0> (by_block_float, last)
    sums = CastLike (sums_float, x)
    shift = Gemm <transB = 1> (sums, shifts)
    y = Gemm <transB = 1> (x, weight, shift)
}
"""

# Folding the sum over experts into the second product leaves two plain products of matrices, and no
# value [E, T, D].
EXPERTS_HIDDEN = """
# Between the two products of the experts: SwiGLU, times the weight with which a token chose the
# expert (0 for the others).
#   both [T, E·F·2] (gate and up in turn), expert_ids [T, K] int64, expert_weights [T, K] float32
#   → hidden [T, E·F]
ExpertsHidden <num_experts> (both, expert_ids, expert_weights) => (hidden) {
    experts = Constant <value_ints: ints = @num_experts> ()
    copy = Constant <value_ints = [0]> ()
    last = Constant <value_ints = [-1]> ()
    two = Constant <value_ints = [2]> ()
    pairs_shape = Concat <axis = 0> (copy, experts, last, two)
    pairs = Reshape (both, pairs_shape)
    gate_4d, up_4d = Split <axis = -1, num_outputs = 2> (pairs)
    gate = Squeeze (gate_4d, last)
    up = Squeeze (up_4d, last)
    sigmoid = Sigmoid (gate)
    silu = Mul (gate, sigmoid)
    product = Mul (silu, up)
    product_float = Cast <to = 1> (product)

    tokens = Shape <start = 0, end = 1> (both)
    dense_shape = Concat <axis = 0> (tokens, experts)
    zeros = ConstantOfShape <value = float[1] {0.0}> (dense_shape)
    dense_weights = ScatterElements <axis = 1> (zeros, expert_ids, expert_weights)
    column = Unsqueeze (dense_weights, last)
    weighted = Mul (product_float, column)
    narrow = CastLike (weighted, both)
    flat = Constant <value_ints = [0, -1]> ()
    hidden = Reshape (narrow, flat)
}
"""


def trt_functions() -> dict[str, onnx.FunctionProto]:
    """Return this target's functions by name."""
    texts = (LINEAR_INT4_SIGNED, LINEAR_INT4_SHIFTED, EXPERTS_HIDDEN)
    return {function.name: function for function in map(define_function, texts)}
