"""Rotary position embedding (arXiv 2104.09864)."""

from __future__ import annotations

ROTARY_ANGLES = """
# Cosine and sine of every rotated dimension, computed once a step.
# scale is yarn's attention factor (arXiv 2309.00071).
#   positions [B, S] int32, inv_freq [R] float32 → cos, sin [T, 1, R] float32
RotaryAngles <scale> (positions, inv_freq) => (cos, sin) {
    column = Constant <value_ints = [-1, 1, 1]> ()
    flat = Reshape (positions, column)
    steps = Cast <to = 1> (flat)
    angles = Mul (steps, inv_freq)
    factor = Constant <value_float: float = @scale> ()
    raw_cos = Cos (angles)
    cos = Mul (raw_cos, factor)
    raw_sin = Sin (angles)
    sin = Mul (raw_sin, factor)
}
"""

# A product with a constant matrix serves both pair layouts with the same four nodes, where slices
# of interleaved pairs would be strided copies. Each column holds a single ±1, so it is exact.
ROTARY = """
# Turn each pair of dimensions by its angle: x · cos + (x @ turn) · sin.
# turn maps the pair (a, b) to (−b, a); it alone knows which dimensions form a pair.
#   x [T, H, R], cos, sin [T, 1, R] float32, turn [R, R] → y [T, H, R]
Rotary (x, cos, sin, turn) => (y) {
    quarter = MatMul (x, turn)
    wide_x = Cast <to = 1> (x)
    wide_quarter = Cast <to = 1> (quarter)
    along = Mul (wide_x, cos)
    across = Mul (wide_quarter, sin)
    turned = Add (along, across)
    y = CastLike (turned, x)
}
"""

ROTARY_FUNCTIONS = (ROTARY_ANGLES, ROTARY)
