"""Linear layers and the gated activation between two of them."""

from __future__ import annotations

LINEAR = """
# Linear layer with the weight as checkpoints store it.
#   x [T, K], weight [N, K] → y [T, N]
Linear (x, weight) => (y) {
    y = Gemm <transB = 1> (x, weight)
}
"""

LINEAR_BIAS = """
# Linear layer with a bias.
#   x [T, K], weight [N, K], bias [N] → y [T, N]
LinearBias (x, weight, bias) => (y) {
    y = Gemm <transB = 1> (x, weight, bias)
}
"""

# A bias is an Add after it, an order of the inputs a Gather before it.
LINEAR_INT4 = """
# Linear layer with 4-bit codes: weight = (code − zero point) · scale, one scale and zero point for
# each row and group of group_size inputs. symmetric tells a replacement that all are 8.
#   x [T, K], codes UINT4 [N, K], scales [N, G], zero_points UINT4 [N, G] → y [T, N]
#   G = ceil(K / group_size)
LinearInt4 <group_size, symmetric> (x, codes, scales, zero_points) => (y) {
    weight = DequantizeLinear <axis = 1, block_size: int = @group_size> (codes, scales, zero_points)
    y = Gemm <transB = 1> (x, weight)
}
"""

SWIGLU = """
# SwiGLU (arXiv 2002.05202): silu(gate) · up, with gate and up side by side.
#   gate_up [T, 2·F] → y [T, F]
SwiGLU (gate_up) => (y) {
    gate, up = Split <axis = -1, num_outputs = 2> (gate_up)
    sigmoid = Sigmoid (gate)
    silu = Mul (gate, sigmoid)
    y = Mul (silu, up)
}
"""

LINEAR_FUNCTIONS = (LINEAR, LINEAR_BIAS, LINEAR_INT4, SWIGLU)
