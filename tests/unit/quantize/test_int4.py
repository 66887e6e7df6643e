from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepseek_triton.quantize.int4 import (
    Int4Linear,
    Int4Weight,
    common_group_size,
    kernel_group_size,
    pack_nibbles,
    unpack_nibbles,
    unpack_words,
)

RNG = np.random.default_rng(0)


def weight(rows: int = 3, columns: int = 20, group_size: int = 8) -> Int4Weight:
    groups = -(-columns // group_size)
    return Int4Weight(
        RNG.integers(0, 16, (rows, columns)).astype(np.uint8),
        RNG.uniform(0.1, 1, (rows, groups)).astype(np.float32),
        RNG.integers(0, 16, (rows, groups)).astype(np.uint8),
        group_size,
    )


def unread(stored: Int4Weight) -> Int4Linear:
    return Int4Linear(
        "layer",
        Path("model.safetensors"),
        stored.shape,
        stored.group_size,
        stored.zero_points is None,
        stored.input_order,
        lambda: stored.codes,
        lambda: stored.scales,
        lambda: stored.zero_points,
    )


def test_values_are_those_of_the_formula_in_partial_groups_too() -> None:
    w = weight()
    assert w.zero_points is not None
    values = w.dequantize()
    for n in range(3):
        for k in range(20):
            code, zero = int(w.codes[n, k]), int(w.zero_points[n, k // 8])
            assert values[n, k] == np.float32(code - zero) * w.scales[n, k // 8]


def test_without_zero_points_8_is_zero() -> None:
    w = weight()
    symmetric = replace(w, zero_points=None)
    eights = replace(w, zero_points=np.full_like(w.zero_points, 8))
    np.testing.assert_array_equal(symmetric.dequantize(), eights.dequantize())


def test_the_input_order_is_undone() -> None:
    w = weight()
    order = RNG.permutation(20).astype(np.int32)
    x = RNG.normal(size=(4, 20)).astype(np.float32)
    gathered = x[:, order] @ w.dequantize().T
    direct = x @ replace(w, input_order=order).dequantize().T
    np.testing.assert_allclose(direct, gathered, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"codes": np.zeros((3, 20), np.int8)},
        {"scales": np.ones((3, 2), np.float32)},
        {"scales": np.ones((3, 3), np.float16)},
        {"zero_points": np.zeros((2, 3), np.uint8)},
        {"group_size": 0},
        {"input_order": np.zeros(20, np.int32)},
    ],
)
def test_parts_that_do_not_belong_together_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        replace(weight(), **changes)


def test_nibbles_are_packed_low_half_first() -> None:
    assert pack_nibbles(np.array([[1, 2, 15, 0]], np.uint8)).tolist() == [[0x21, 0x0F]]
    codes = RNG.integers(0, 16, (2, 3, 8)).astype(np.uint8)
    np.testing.assert_array_equal(unpack_nibbles(pack_nibbles(codes)), codes)


def test_words_are_unpacked_lowest_bits_first_also_where_they_are_negative() -> None:
    assert unpack_words(np.array([[0x76543210]], np.int32)).tolist() == [[*range(8)]]
    assert unpack_words(np.array([[-1]], np.int32)).tolist() == [[15] * 8]


@pytest.mark.parametrize(
    ("columns", "group_size", "expected"),
    [
        (256, 128, 128),
        (256, 32, 32),
        (96, 96, 32),  # one group a row
        (1000, 1000, 128),  # one group fills any K
        (96, 64, 32),  # 64 does not divide 96
        (512, 256, 128),
        (1000, 128, 128),  # cannot be cut to divide K
        (300, 100, 100),  # nor be a size that kernels take
    ],
)
def test_groups_are_cut_to_what_kernels_take(columns: int, group_size: int, expected: int) -> None:
    assert kernel_group_size(columns, group_size) == expected


@pytest.mark.parametrize(
    ("columns", "group_size", "size"), [(96, 96, 32), (40, 16, 8), (40, 40, 16)]
)
def test_smaller_groups_have_the_same_values(columns: int, group_size: int, size: int) -> None:
    w = weight(3, columns, group_size)
    cut = unread(w).with_groups_of(size).read()
    assert cut.group_size == size
    np.testing.assert_array_equal(cut.dequantize(), w.dequantize())


def test_groups_are_not_cut_unevenly() -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        unread(weight(3, 48, 24)).with_groups_of(16)


def test_a_common_group_size_is_one_that_all_can_be_cut_to() -> None:
    coarse, fine, odd = (unread(weight(2, 384, size)) for size in (128, 32, 48))
    assert common_group_size([coarse, fine]) == 32
    assert common_group_size([coarse, odd]) == 16
    assert common_group_size([coarse, unread(weight(2, 300, 100))]) is None
