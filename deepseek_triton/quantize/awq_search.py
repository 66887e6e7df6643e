"""Activation-aware search of channel scales and of clipping (AWQ, arXiv 2306.00978).

Input channels that carry large activations matter most. Scaling them up before rounding, and the
activations down by as much, makes their rounding errors smaller relative to their values. With
x the inputs of a linear layer, W its weight and Q the rounding, the search minimises

    E‖ x (W − Ŵ)ᵀ ‖² = tr(Δ M Δᵀ),   Δ = W − Ŵ,   M = E[xᵀ x]

over Ŵ = Q(W · s) / s. M [K, K] is all that is kept of the activations, whatever their number.
Rounding clips: a span that leaves out a group's largest values rounds the others more finely. Each
scale is judged with the clipping that suits it, since the two mend the same outliers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.quantize.int4 import Int4Weight
from deepseek_triton.quantize.rtn import encode, quantize_rtn, span, split_groups

_EXPONENTS = np.arange(11) / 10  # 0, 0.1 … 1
_CLIPS = np.arange(20, 9, -1, dtype=np.float32) / 20  # 1.0, 0.95 … 0.5
_SAMPLE_ROWS = 256  # of a weight that the search of its scale looks at
_ROWS = 512  # of a weight that are worked on at a time


@dataclass(frozen=True)
class Scheme:
    """How weights are rounded."""

    group_size: int
    symmetric: bool
    scale_dtype: np.dtype[Any]

    def quantize(
        self, weight: NDArray[np.float32], clip: NDArray[np.float32] | None = None
    ) -> Int4Weight:
        """Round `weight` [N, K]; see quantize_rtn."""
        return quantize_rtn(
            weight,
            self.group_size,
            symmetric=self.symmetric,
            scale_dtype=self.scale_dtype,
            clip=clip,
        )


def candidate_scales(
    activations: NDArray[np.float32], rows: NDArray[np.intp]
) -> list[NDArray[np.float32]]:
    """Return the scales [K] to try: E|x|^α, α = 0 … 1, the first being all ones.

    `activations` [K] is E|x|. Channels with one entry in `rows` [K] are made by one row of the
    layer before and so share a scale. Each is normalised to a geometric mean of its extremes of 1.
    """
    totals = np.bincount(rows, activations)[rows]
    means = totals / np.bincount(rows)[rows]
    means = np.maximum(means, 1e-4 * max(float(means.mean()), 1e-30))
    scales = []
    for exponent in _EXPONENTS:
        scale = means**exponent
        scales.append((scale / np.sqrt(scale.max() * scale.min())).astype(np.float32))
    return scales


def scale_errors(
    weight: NDArray[np.float32],
    moment: NDArray[np.float32],
    scales: list[NDArray[np.float32]],
    scheme: Scheme,
) -> NDArray[np.float64]:
    """Return the relative output error of each of `scales`, [len(scales)].

    `weight` [N, K], `moment` [K, K]. Of a large weight a sample of the rows, evenly spread, is
    tried.
    """
    sample = weight[:: -(-len(weight) // _SAMPLE_ROWS)]
    energy = max(output_error(sample, moment), 1e-30)
    errors = []
    for scale in scales:
        scaled, scaled_moment = sample * scale, moment / (scale[:, None] * scale)
        rounded = scheme.quantize(scaled, search_clip(scaled, scaled_moment, scheme))
        errors.append(output_error(scaled - rounded.dequantize(), scaled_moment) / energy)
    return np.array(errors)


def output_error(difference: NDArray[np.float32], moment: NDArray[np.float32] | None) -> float:
    """Return tr(Δ M Δᵀ) for Δ [N, K] and M [K, K]; None is the identity, without its product."""
    product = difference if moment is None else difference @ moment
    return float(np.einsum("nk,nk->n", product, difference).sum(dtype=np.float64))


def search_clip(
    weight: NDArray[np.float32], moment: NDArray[np.float32], scheme: Scheme
) -> NDArray[np.float32]:
    """Return [N, G]: how far to shrink each group's span for the least output error.

    Groups are judged one by one, with the diagonal blocks of `moment` [K, K].
    """
    groups = weight.shape[1] // scheme.group_size
    blocks = moment.reshape(groups, scheme.group_size, groups, scheme.group_size)
    diagonal = blocks[np.arange(groups), :, np.arange(groups)]  # [G, g, g]
    parts = [_clip_rows(rows, diagonal, scheme) for rows in _row_chunks(weight)]
    return np.concatenate(parts)


def _clip_rows(
    weight: NDArray[np.float32], diagonal: NDArray[np.float32], scheme: Scheme
) -> NDArray[np.float32]:
    grouped = split_groups(weight, scheme.group_size)
    low, high = span(grouped, scheme.symmetric)
    best = np.full(low.shape, np.inf, np.float32)
    chosen = np.ones(low.shape, np.float32)
    for clip in _CLIPS:
        codes, scales, zeros = encode(
            grouped, low * clip, high * clip, scheme.symmetric, scheme.scale_dtype
        )
        values = (codes - zeros[..., None].astype(np.float32)) * scales[..., None]
        difference = (grouped - values).transpose(1, 0, 2)  # [G, N, g]
        errors = ((difference @ diagonal) * difference).sum(axis=-1).T
        better = errors < best
        best[better], chosen[better] = errors[better], clip
    return chosen


def _row_chunks(weight: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    for start in range(0, len(weight), _ROWS):
        yield weight[start : start + _ROWS]
