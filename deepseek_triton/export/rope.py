"""Constants of the rotary embedding: frequencies, YaRN's attention factor, the pair layout."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.checkpoint.spec import LinearSpec, Llama3Spec, RopeSpec, YarnSpec


def inverse_frequencies(rope: RopeSpec) -> NDArray[np.float32]:
    """Return [dim]: the angle per position of each dimension, in the order of `rope.interleaved`.

    Plain: theta^(−2i/dim) (arXiv 2104.09864, eq. 15). Linear scaling divides it by `factor` (arXiv
    2306.15595). YaRN and Llama 3 mix the two, pair by pair (arXiv 2309.00071, section 3.2; arXiv
    2407.21783). In float32 throughout, as the reference computes it: at large positions the
    rounding of a frequency is visible.
    """
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    periods = np.float32(rope.theta) ** exponents
    frequencies = np.reciprocal(periods)
    scaling = rope.scaling
    if isinstance(scaling, YarnSpec):
        interpolated = np.float32(1) / (np.float32(scaling.factor) * periods)
        keep = np.float32(1) - _yarn_ramp(rope, scaling)
        frequencies = interpolated * (np.float32(1) - keep) + frequencies * keep
    elif isinstance(scaling, LinearSpec):
        frequencies = frequencies / np.float32(scaling.factor)
    elif isinstance(scaling, Llama3Spec):
        keep = _llama3_ramp(frequencies, scaling)
        frequencies = frequencies / np.float32(scaling.factor) * (1 - keep) + frequencies * keep
    if rope.interleaved:
        return np.repeat(frequencies, 2)
    return np.tile(frequencies, 2)


def _yarn_ramp(rope: RopeSpec, yarn: YarnSpec) -> NDArray[np.float32]:
    """Return [dim/2] in [0, 1]: 0 where a pair turns often enough to keep its frequency."""

    def pair_turning(times: float) -> float:
        """Index of the pair that makes `times` full turns over the original context."""
        period = yarn.original_max_position_embeddings / (times * 2 * math.pi)
        return rope.dim * math.log(period) / (2 * math.log(rope.theta))

    low, high = pair_turning(yarn.beta_fast), pair_turning(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # a step rather than a division by zero
    index = np.arange(rope.dim // 2, dtype=np.float32)
    ramp = (index - np.float32(low)) / np.float32(high - low)
    return np.clip(ramp, 0, 1).astype(np.float32)


def _llama3_ramp(frequencies: NDArray[np.float32], llama3: Llama3Spec) -> NDArray[np.float32]:
    """Return [dim/2] in [0, 1]: 1 where a pair turns often enough to keep its frequency."""
    turns = np.float32(llama3.original_max_position_embeddings / (2 * math.pi)) * frequencies
    low, high = np.float32(llama3.low_freq_factor), np.float32(llama3.high_freq_factor)
    return np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)


def attention_factor(rope: RopeSpec) -> float:
    """Return what cos and sin are multiplied by: yarn's temperature (arXiv 2309.00071, eq. 22).

    With both mscale and mscale_all_dim set (DeepSeek), the ratio of the two: the rest of the
    temperature is in the softmax scale.
    """
    yarn = rope.yarn
    if yarn is None:
        return 1.0
    if yarn.mscale and yarn.mscale_all_dim:
        return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return _mscale(yarn.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def quarter_turn(rope: RopeSpec) -> NDArray[np.float32]:
    """Return [dim, dim] so that x @ turn replaces each pair (a, b) of a row x by (−b, a)."""
    turn = np.zeros((rope.dim, rope.dim), dtype=np.float32)
    pairs = np.arange(rope.dim // 2)
    first, second = (
        (2 * pairs, 2 * pairs + 1)
        if rope.interleaved
        else (
            pairs,
            pairs + rope.dim // 2,
        )
    )
    turn[second, first] = -1
    turn[first, second] = 1
    return turn
