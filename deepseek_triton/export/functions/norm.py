"""Root-mean-square norm, and what tells whether it could be computed."""

from __future__ import annotations

# Pow rather than Mul(x, x): ONNX Runtime's norm fusion looks for it.
RMS_NORM = """
# Root-mean-square norm (arXiv 1910.07467) over the last axis:
# x / sqrt(mean(x²) + epsilon) · weight.
#   x [..., D], weight [D] → y [..., D]
RMSNorm <epsilon> (x, weight) => (y) {
    wide = Cast <to = 1> (x)
    two = Constant <value_float = 2.0> ()
    squares = Pow (wide, two)
    last = Constant <value_ints = [-1]> ()
    mean = ReduceMean <keepdims = 1> (squares, last)
    eps = Constant <value_float: float = @epsilon> ()
    shifted = Add (mean, eps)
    rms = Sqrt (shifted)
    normed = Div (wide, rms)
    narrow = CastLike (normed, x)
    y = Mul (narrow, weight)
}
"""

# Mul and ReduceSum: ONNX Runtime's other reductions would need cuDNN on CUDA.
SQUARED_NORM = """
# Sum of the squares over the last axis, in float32. It is not finite where x is not, nor where
# RMSNorm's squares overflow, which makes that norm 0.
#   x [..., D] → y [..., 1] float32
SquaredNorm (x) => (y) {
    wide = Cast <to = 1> (x)
    squares = Mul (wide, wide)
    last = Constant <value_ints = [-1]> ()
    y = ReduceSum <keepdims = 1> (squares, last)
}
"""

NORM_FUNCTIONS = (RMS_NORM, SQUARED_NORM)
