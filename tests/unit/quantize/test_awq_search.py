from __future__ import annotations

import numpy as np
import pytest

from deepseek_triton.quantize.awq_search import (
    Scheme,
    candidate_scales,
    output_error,
    scale_errors,
    search_clip,
)

RNG = np.random.default_rng(0)
SCHEMES = [Scheme(32, symmetric, np.dtype(np.float32)) for symmetric in (True, False)]
WEIGHT = RNG.normal(0, 1, (48, 64)).astype(np.float32)
X = RNG.normal(0, 1, (500, 64)).astype(np.float32)
LOUD = [3, 40]
X[:, LOUD] *= 30  # channels that carry large activations, by
WEIGHT[:, LOUD] *= 0.1  # weights so small that few levels are left for them
MOMENT = X.T @ X / np.float32(len(X))
ROWS = np.arange(64)


def test_the_error_is_that_of_the_outputs() -> None:
    difference = RNG.normal(0, 1, (5, 64)).astype(np.float32)
    expected = ((X.astype(np.float64) @ difference.T) ** 2).sum() / len(X)
    assert output_error(difference, MOMENT) == pytest.approx(expected, rel=1e-5)


def test_the_first_candidate_leaves_the_channels_alone_and_the_last_follows_them() -> None:
    magnitude = np.abs(X).mean(axis=0)
    scales = candidate_scales(magnitude, ROWS)
    np.testing.assert_array_equal(scales[0], 1)
    np.testing.assert_allclose(scales[-1] / scales[-1][0], magnitude / magnitude[0], rtol=1e-4)
    assert all(s.max() * s.min() == pytest.approx(1, rel=1e-5) for s in scales)


def test_channels_made_by_one_row_share_a_scale() -> None:
    rows = np.tile(np.arange(16), 4)
    for scale in candidate_scales(np.abs(X).mean(axis=0), rows):
        by_row = scale.reshape(4, 16)
        np.testing.assert_array_equal(by_row, np.broadcast_to(by_row[0], (4, 16)))


def test_a_channel_without_activations_does_not_break_the_scales() -> None:
    magnitude = np.abs(X).mean(axis=0)
    magnitude[5] = 0
    assert all(np.isfinite(s).all() and (s > 0).all() for s in candidate_scales(magnitude, ROWS))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scaling_wins_where_few_channels_carry_large_activations(scheme: Scheme) -> None:
    scales = candidate_scales(np.abs(X).mean(axis=0), ROWS)
    errors = scale_errors(WEIGHT, MOMENT, scales, scheme)
    assert 0 < errors.argmin()
    assert errors.min() < 0.6 * errors[0]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_clipping_never_costs_and_helps_where_a_value_stands_out(scheme: Scheme) -> None:
    white = np.eye(64, dtype=np.float32)
    weight = RNG.normal(0, 1, (48, 64)).astype(np.float32)
    weight[::2, 7] = 4.0
    plain = scheme.quantize(weight).dequantize()
    clip = search_clip(weight, white, scheme)
    clipped = scheme.quantize(weight, clip).dequantize()

    def by_group(values: np.ndarray) -> np.ndarray:
        return ((weight - values) ** 2).reshape(48, 2, 32).sum(axis=-1)

    assert (by_group(clipped) <= by_group(plain) * (1 + 1e-5)).all()
    assert by_group(clipped).sum() < 0.97 * by_group(plain).sum()
    assert clip.max() == 1.0 and clip.min() < 1.0
