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

LINEAR_FUNCTIONS = (LINEAR, LINEAR_BIAS, SWIGLU)
