"""Shapes of a call that keep the last bit of a row's logits independent of the other rows.

ONNX Runtime's float32 product (MLAS, sgemm) sums over K in blocks of 128, unless a thread computes
64 columns or fewer: then in longer ones, and rounds otherwise. It gives each product of a batch to
threads / batch threads, rounded up, which share its columns if there are more columns than rows, in
units of 16. So, in the two products of attention with B rows of S tokens,

    scores    [S·H, W] x [W, keys]      needs keys >= 80 for each thread that shares a row
    values    [S·H, keys] x [keys, W]   needs W >= 80 for each, unless S·H >= W

and what a call lacks is added: keys by longer block tables, rows by copies of the first one.
"""

from __future__ import annotations

_COLUMNS = 80  # the first multiple of 16 above 64


def padded_batch(batch: int, length: int, *, num_heads: int, width: int, num_threads: int) -> int:
    """Return how many rows a call of `batch` rows, `length` tokens each, must have."""
    if length * num_heads >= width:
        return batch
    sharing = max(1, width // _COLUMNS)  # threads that may share one row's product
    return max(batch, -(-num_threads // sharing))


def least_keys(batch: int, num_threads: int) -> int:
    """Return how many keys, padding included, a call of `batch` rows must have."""
    return _COLUMNS * -(-num_threads // batch)
