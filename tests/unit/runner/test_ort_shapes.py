from __future__ import annotations

import pytest

from deepseek_triton.runner.ort_shapes import least_keys, padded_batch


@pytest.mark.parametrize("num_threads", [1, 2, 7, 8, 16, 64])
@pytest.mark.parametrize("batch", [1, 2, 5, 40])
@pytest.mark.parametrize("width", [32, 80, 576])
def test_no_thread_gets_64_columns_or_fewer(num_threads: int, batch: int, width: int) -> None:
    rows = padded_batch(batch, 1, num_heads=16, width=width, num_threads=num_threads)
    assert rows >= batch
    sharing = -(-num_threads // rows)
    for columns in (width, least_keys(rows, num_threads)):
        units = -(-columns // 16)
        assert sharing == 1 or (units // sharing) * 16 > 64


def test_nothing_is_added_where_a_product_is_split_by_rows_or_not_at_all() -> None:
    assert padded_batch(1, 512, num_heads=16, width=576, num_threads=64) == 1
    assert padded_batch(3, 1, num_heads=16, width=576, num_threads=2) == 3
    assert least_keys(8, 2) == 80
