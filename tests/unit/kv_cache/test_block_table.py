import numpy as np
import pytest

from deepseek_triton.kv_cache.block_table import BlockTable


def test_keeps_order_over_many_appends():
    table = BlockTable()
    expected: list[int] = []
    for size in (1, 3, 0, 7, 1, 40):
        blocks = list(range(len(expected), len(expected) + size))
        table.append(blocks)
        expected += blocks
        assert table.ids.tolist() == expected
        assert len(table) == len(expected)
    assert table.ids.dtype == np.int32


def test_a_view_is_neither_copied_nor_writable():
    table = BlockTable()
    table.append([4, 5])
    assert table.ids is table.ids
    with pytest.raises(ValueError, match="read-only"):
        table.ids[0] = 1


def test_a_view_handed_out_survives_growth_and_clearing():
    table = BlockTable()
    table.append([4, 5])
    view = table.ids
    table.append(list(range(100)))
    table.clear()
    table.append([9, 9, 9])
    assert view.tolist() == [4, 5]


def test_clear_returns_what_was_held():
    table = BlockTable()
    table.append([3, 1, 2])
    assert table.clear() == [3, 1, 2]
    assert len(table) == 0
    assert table.clear() == []
