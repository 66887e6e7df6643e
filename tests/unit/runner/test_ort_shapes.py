from __future__ import annotations

import pytest

from deepseek_triton.runner.ort_shapes import AttentionShape


@pytest.mark.parametrize("num_threads", [1, 2, 7, 8, 16, 64])
@pytest.mark.parametrize("batch", [1, 2, 5, 40])
@pytest.mark.parametrize("num_groups", [1, 2, 16])
@pytest.mark.parametrize("width", [32, 80, 576])
def test_no_thread_gets_64_columns_or_fewer(
    num_threads: int, batch: int, num_groups: int, width: int
) -> None:
    shape = AttentionShape(num_heads=16, num_groups=num_groups, width=width)
    rows = shape.padded_batch(batch, 1, num_threads)
    assert rows >= batch
    sharing = -(-num_threads // (rows * num_groups))
    for columns in (width, shape.least_keys(rows, num_threads)):
        units = -(-columns // 16)
        assert sharing == 1 or (units // sharing) * 16 > 64


def test_nothing_is_added_where_a_product_is_split_by_rows_or_not_at_all() -> None:
    latent = AttentionShape(num_heads=16, num_groups=1, width=576)
    assert latent.padded_batch(1, 512, 64) == 1
    assert latent.padded_batch(3, 1, 2) == 3
    assert latent.least_keys(8, 2) == 80
    grouped = AttentionShape(num_heads=16, num_groups=8, width=64)
    assert grouped.padded_batch(1, 1, 8) == 1
    assert grouped.least_keys(1, 8) == 80
