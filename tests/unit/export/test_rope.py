from __future__ import annotations

import math

import numpy as np
import pytest

from deepseek_triton.checkpoint.spec import LinearSpec, Llama3Spec, RopeSpec, YarnSpec
from deepseek_triton.export.rope import attention_factor, inverse_frequencies, quarter_turn

YARN = YarnSpec(factor=40.0, original_max_position_embeddings=4096)


def test_plain_frequencies_fall_geometrically() -> None:
    frequencies = inverse_frequencies(RopeSpec(dim=8, theta=10000.0, interleaved=False))
    expected = [1.0, 0.1, 0.01, 0.001]
    np.testing.assert_allclose(frequencies, expected + expected, rtol=1e-6)
    assert frequencies.dtype == np.float32


def test_interleaved_frequencies_repeat_within_each_pair() -> None:
    frequencies = inverse_frequencies(RopeSpec(dim=4, theta=100.0, interleaved=True))
    np.testing.assert_allclose(frequencies, [1.0, 1.0, 0.1, 0.1], rtol=1e-6)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    plain = inverse_frequencies(RopeSpec(64, 10000.0, False))[:32]
    yarn = inverse_frequencies(RopeSpec(64, 10000.0, False, YARN))[:32]
    # In 4,096 tokens, pairs up to 10 turn more than 32 times, and from 23 on less than once.
    np.testing.assert_array_equal(yarn[:11], plain[:11])
    np.testing.assert_allclose(yarn[23:], plain[23:] / 40, rtol=1e-6)
    assert np.all(yarn[11:23] < plain[11:23])
    assert np.all(yarn[11:23] > plain[11:23] / 40)


def test_untruncated_yarn_mixes_other_pairs() -> None:
    truncated = inverse_frequencies(RopeSpec(64, 10000.0, False, YARN))
    exact = YarnSpec(40.0, 4096, truncate=False)
    untruncated = inverse_frequencies(RopeSpec(64, 10000.0, False, exact))
    assert not np.array_equal(truncated, untruncated)


def test_a_yarn_ramp_of_no_width_stays_finite() -> None:
    # So short a context that both ends of the ramp are cut off at pair 0.
    yarn = YarnSpec(factor=4.0, original_max_position_embeddings=1)
    frequencies = inverse_frequencies(RopeSpec(8, 10000.0, False, yarn))
    assert np.isfinite(frequencies).all()


def test_linear_scaling_divides_every_frequency() -> None:
    plain = inverse_frequencies(RopeSpec(64, 100000.0, False))
    scaled = inverse_frequencies(RopeSpec(64, 100000.0, False, LinearSpec(4.0)))
    np.testing.assert_array_equal(scaled, plain / 4)


def test_llama3_keeps_fast_pairs_and_divides_slow_ones() -> None:
    plain = inverse_frequencies(RopeSpec(128, 500000.0, False))[:64]
    llama3 = Llama3Spec(8.0, 1.0, 4.0, 8192)
    scaled = inverse_frequencies(RopeSpec(128, 500000.0, False, llama3))[:64]
    turns = 8192 * plain / (2 * math.pi)
    fast, slow = turns > 4, turns < 1
    assert fast.sum() == 29
    assert slow.sum() == 29
    np.testing.assert_array_equal(scaled[fast], plain[fast])
    np.testing.assert_array_equal(scaled[slow], plain[slow] / 8)
    # Between them the weight of the kept frequency grows with the turns, from 0 at 1 to 1 at 4.
    keep = (turns - 1) / 3
    mixed = plain / 8 * (1 - keep) + plain * keep
    between = ~(fast | slow)
    np.testing.assert_allclose(scaled[between], mixed[between], rtol=1e-6)


def test_only_yarn_changes_the_temperature() -> None:
    assert attention_factor(RopeSpec(64, 10000.0, False, LinearSpec(4.0))) == 1.0
    assert attention_factor(RopeSpec(64, 10000.0, False, Llama3Spec(8.0, 1.0, 4.0, 8192))) == 1.0


@pytest.mark.parametrize(
    ("mscale", "all_dim", "expected"),
    [
        (None, None, 0.1 * math.log(40) + 1),
        (1.0, None, 0.1 * math.log(40) + 1),
        (1.0, 1.0, 1.0),
        (0.707, 1.0, (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)),
    ],
)
def test_attention_factor(mscale: float | None, all_dim: float | None, expected: float) -> None:
    yarn = YarnSpec(40.0, 4096, mscale=mscale, mscale_all_dim=all_dim)
    assert attention_factor(RopeSpec(64, 10000.0, True, yarn)) == pytest.approx(expected)


def test_attention_factor_is_one_without_stretching() -> None:
    assert attention_factor(RopeSpec(64, 10000.0, True)) == 1.0
    assert attention_factor(RopeSpec(64, 10000.0, True, YarnSpec(1.0, 4096))) == 1.0


def test_quarter_turn_of_both_layouts() -> None:
    x = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    halves = quarter_turn(RopeSpec(4, 10000.0, interleaved=False))
    np.testing.assert_array_equal(x @ halves, [[-3, -4, 1, 2]])
    pairs = quarter_turn(RopeSpec(4, 10000.0, interleaved=True))
    np.testing.assert_array_equal(x @ pairs, [[-2, 1, -4, 3]])
