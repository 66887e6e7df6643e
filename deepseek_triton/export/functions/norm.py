"""Root-mean-square norm."""

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

NORM_FUNCTIONS = (RMS_NORM,)
