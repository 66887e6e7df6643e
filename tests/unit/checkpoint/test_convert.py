"""Conversions give the bits of ml_dtypes and NumPy, which convert one value at a time."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from deepseek_triton.checkpoint.convert import converted, narrowed
from deepseek_triton.errors import BuildError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALF, FLOAT = np.dtype(np.float16), np.dtype(np.float32)


def same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Compare bit by bit; a NaN need only be a NaN."""
    assert found.dtype == expected.dtype
    assert found.flags.c_contiguous
    kind = np.uint16 if found.itemsize == 2 else np.uint32
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), nan)
    np.testing.assert_array_equal(found.view(kind)[~nan], expected.view(kind)[~nan])


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_every_bfloat16_becomes_what_ml_dtypes_makes_of_it(dtype: np.dtype) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16)
    with np.errstate(all="ignore"):
        expected = values.astype(dtype)
    same_bits(converted(values, dtype), expected)


def test_float32_is_rounded_to_the_nearest_float16_ties_to_even() -> None:
    exact = np.arange(1 << 16, dtype=np.uint16).view(HALF).astype(np.float32)
    finite = np.sort(np.abs(exact[np.isfinite(exact)]))
    ties = (finite[1:] + finite[:-1]) / 2  # exact in float32, subnormals too
    ties = np.append(ties, np.float32(65520))  # the first that overflows
    bits = ties.view(np.uint32)
    near = [(bits + d).view(np.float32) for d in (-1, 1)]  # a hair below and above
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, np.uint32).view(np.float32)
    values = np.concatenate([exact, ties, *near, -ties, -near[0], -near[1], random])
    with np.errstate(all="ignore"):
        expected = values.astype(HALF)
    same_bits(converted(values, HALF), expected)


@pytest.mark.parametrize("stored", [np.float64, np.float32, np.float16, np.int64, BFLOAT16])
@pytest.mark.parametrize("dtype", [HALF, FLOAT, BFLOAT16])
def test_views_that_are_strided_unaligned_or_empty_convert_like_others(
    stored: np.dtype, dtype: np.dtype
) -> None:
    values = np.arange(-7, 8).astype(stored)
    same_bits(converted(values[::-2], dtype), values[::-2].astype(dtype))
    shifted = np.frombuffer(b"-" + values.tobytes(), np.uint8)[1:].view(stored)
    same_bits(converted(shifted, dtype), values.astype(dtype))
    assert converted(values[:0], dtype).shape == (0,)


def test_the_largest_float16_is_held_and_the_next_value_is_not() -> None:
    below = np.nextafter(np.float32(65520), np.float32(0))  # rounds down to 65504
    assert narrowed("w", np.array([below, -below]), HALF).tolist() == [65504, -65504]
    for beyond in (65520, -65520, np.inf):
        with pytest.raises(BuildError, match=r"^w: a weight is beyond the range of fp16"):
            narrowed("w", np.array([0, beyond], np.float32), HALF)


def test_the_largest_bfloat16_is_held_and_the_next_value_is_not() -> None:
    largest = np.array([0x7F7F], np.uint16).view(BFLOAT16)
    values = np.concatenate([largest, -largest]).astype(np.float32)
    same_bits(narrowed("w", values, BFLOAT16), np.concatenate([largest, -largest]))
    for beyond in (3.4e38, -3.4e38, np.inf):
        with pytest.raises(BuildError, match=r"beyond the range of bf16 .* PRECISION=fp32"):
            narrowed("w", np.array([0, beyond], np.float32), BFLOAT16)
    stored = np.array([np.inf]).astype(BFLOAT16)
    assert narrowed("w", stored, BFLOAT16) is stored, "what is stored so is left as it is"


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
def test_a_weight_that_is_no_number_is_not_said_to_be_too_large(dtype: np.dtype) -> None:
    with pytest.raises(BuildError, match=r"^w: a weight is NaN"):
        narrowed("w", np.array([0, np.nan, np.inf], np.float32), dtype)
