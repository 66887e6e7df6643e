"""Shapes of a call that keep the last bit of a row's logits independent of the other rows.

ONNX Runtime's float32 product (MLAS, sgemm) sums over K in blocks of 128, unless a thread computes
64 columns or fewer: then in longer ones, and rounds otherwise. It gives each product of a batch to
threads / batch threads, rounded up, which share its columns if there are more columns than rows, in
units of 16. So, in the two products of attention with B rows of S tokens, of which there are B·G
for G groups of heads (latent attention has one),

    scores    [S·H/G, W] x [W, keys]      needs keys >= 80 for each thread that shares a product
    values    [S·H/G, keys] x [keys, W]   needs W >= 80 for each, unless S·H/G >= W

and what a call lacks is added: keys by longer block tables, rows by copies of the first one.
"""

from __future__ import annotations

from dataclasses import dataclass

_COLUMNS = 80  # the first multiple of 16 above 64


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of attention's products."""

    num_heads: int
    num_groups: int  # of heads that share their keys
    width: int  # of a group's key

    def padded_batch(self, batch: int, length: int, num_threads: int) -> int:
        """Return how many rows a call of `batch` rows, `length` tokens each, must have."""
        if length * self.num_heads >= self.width * self.num_groups:
            return batch
        sharing = max(1, self.width // _COLUMNS)  # threads that may share one product
        return max(batch, -(-num_threads // (sharing * self.num_groups)))

    def least_keys(self, batch: int, num_threads: int) -> int:
        """Return how many keys, padding included, a call of `batch` rows must have."""
        return _COLUMNS * -(-num_threads // (batch * self.num_groups))
