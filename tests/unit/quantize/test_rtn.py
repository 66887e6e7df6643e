from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from deepseek_triton.errors import ConfigError
from deepseek_triton.quantize.int4 import Int4Weight
from deepseek_triton.quantize.rtn import quantize_rtn

FLOAT = np.dtype(np.float32)
WEIGHT = np.random.default_rng(0).normal(0, 1, (6, 64)).astype(np.float32)


def by_loops(weight: NDArray[np.float32], group: int, symmetric: bool) -> NDArray[np.float64]:
    """The definition, one value at a time in float64."""
    values = np.zeros(weight.shape)
    for n, row in enumerate(weight.astype(np.float64)):
        for start in range(0, len(row), group):
            part = row[start : start + group]
            if symmetric:
                scale, zero = 2 * max(abs(part)) / 15, 8
            else:
                low, high = min(0.0, min(part)), max(0.0, max(part))
                scale = (high - low) / 15
                zero = round(-low / scale)
            for i, value in enumerate(part):
                code = min(max(round(value / scale) + zero, 0), 15)
                values[n, start + i] = (code - zero) * scale
    return values


def quantize(weight: NDArray[np.float32], group: int, symmetric: bool) -> Int4Weight:
    return quantize_rtn(weight, group, symmetric=symmetric, scale_dtype=FLOAT)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [16, 64])
def test_values_are_those_of_the_definition(group: int, symmetric: bool) -> None:
    found = quantize(WEIGHT, group, symmetric).dequantize()
    expected = by_loops(WEIGHT, group, symmetric)
    # The largest value of a symmetric group lies between two levels: either will do.
    np.testing.assert_allclose(np.abs(found - WEIGHT), np.abs(expected - WEIGHT), atol=1e-6)
    assert np.isclose(found, expected, atol=1e-6).mean() > 0.97


def test_zero_points_halve_the_step_of_one_sided_groups() -> None:
    weight = np.abs(WEIGHT)
    steps = [quantize(weight, 32, symmetric).scales for symmetric in (True, False)]
    np.testing.assert_allclose(steps[0], 2 * steps[1], rtol=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_stays_zero_whatever_is_beside_it(symmetric: bool) -> None:
    weight = WEIGHT.copy()
    weight[:, ::3] = 0
    weight[2] = 0
    found = quantize(weight, 32, symmetric).dequantize()
    assert not found[weight == 0].any()


def test_codes_are_chosen_for_the_scale_that_is_stored() -> None:
    bf16 = np.dtype(ml_dtypes.bfloat16)
    weight = quantize_rtn(WEIGHT, 64, symmetric=False, scale_dtype=bf16)
    assert np.array_equal(weight.scales, weight.scales.astype(bf16).astype(np.float32))
    error = np.abs(weight.dequantize() - WEIGHT)
    # Half a step, and where the rounded span ends early what it lacks: 2^-9 of it.
    assert (error <= weight.scales * (0.5 + 15 * 2.0**-9 + 0.5)).all()
    assert np.median(error / weight.scales) < 0.3


def test_clipping_shrinks_the_span() -> None:
    clip = np.full((6, 1), 0.5, np.float32)
    clipped = quantize_rtn(WEIGHT, 64, symmetric=True, scale_dtype=FLOAT, clip=clip)
    np.testing.assert_allclose(clipped.scales, quantize(WEIGHT, 64, True).scales / 2, rtol=1e-6)


def test_groups_that_do_not_fill_the_channels_are_refused() -> None:
    with pytest.raises(ConfigError, match="GROUP: groups of 48 do not fill 64"):
        quantize(WEIGHT, 48, True)
