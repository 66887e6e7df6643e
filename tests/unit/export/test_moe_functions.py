"""Routing and expert functions against their formulas in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.export.test_functions import Array, call, normal, silu, softmax

TOKENS, EXPERTS, TOP_K, GROUPS, TOP_GROUPS = 50, 12, 3, 4, 2


def by_expert(ids: Array, weights: Array) -> NDArray[np.float32]:
    """Scatter weights to [T, E], so that the order of the chosen experts does not matter."""
    dense = np.zeros((len(ids), EXPERTS), np.float32)
    np.put_along_axis(dense, ids, weights, axis=1)
    return dense


def keep_best(scores: Array, count: int) -> Array:
    """Mask of the `count` largest scores of each row."""
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, np.argsort(-scores, axis=1)[:, :count], True, axis=1)
    return mask


def expand(groups: Array) -> Array:
    return np.repeat(groups, EXPERTS // GROUPS, axis=1)


def test_softmax_routing_takes_the_most_probable_experts() -> None:
    logits = normal(TOKENS, EXPERTS)
    ids, weights = call("RouteSoftmax", logits, top_k=[TOP_K], scaling_factor=1.5)
    scores = softmax(logits)
    want = np.where(keep_best(scores, TOP_K), scores * 1.5, 0)
    np.testing.assert_allclose(by_expert(ids, weights), want, rtol=1e-5, atol=1e-7)
    assert ids.dtype == np.int64


def test_grouped_softmax_routing_stays_within_the_groups_with_the_best_expert() -> None:
    logits = normal(TOKENS, EXPERTS)
    ids, weights = call(
        "RouteSoftmaxGrouped",
        logits,
        top_k=[TOP_K],
        num_groups=[GROUPS],
        top_groups=[TOP_GROUPS],
        scaling_factor=2.0,
    )
    scores = softmax(logits)
    groups = keep_best(scores.reshape(TOKENS, GROUPS, -1).max(-1), TOP_GROUPS)
    limited = np.where(expand(groups), scores, 0)
    want = np.where(keep_best(limited, TOP_K), scores * 2, 0)
    np.testing.assert_allclose(by_expert(ids, weights), want, rtol=1e-5, atol=1e-7)
    assert not np.array_equal(keep_best(scores, TOP_K), keep_best(limited, TOP_K))


@pytest.mark.parametrize("normalize", [1.0, 0.0])
@pytest.mark.parametrize("grouped", [True, False])
def test_sigmoid_routing_chooses_by_bias_and_weighs_without_it(
    normalize: float, grouped: bool
) -> None:
    logits, bias = normal(TOKENS, EXPERTS), normal(EXPERTS)
    limits = {"num_groups": [GROUPS], "top_groups": [TOP_GROUPS]} if grouped else {}
    ids, weights = call(
        "RouteSigmoidGrouped" if grouped else "RouteSigmoid",
        logits,
        bias,
        top_k=[TOP_K],
        scaling_factor=2.5,
        normalize=normalize,
        **limits,
    )
    scores = 1 / (1 + np.exp(-logits))
    choice = scores + bias
    if grouped:
        best_two = np.sort(choice.reshape(TOKENS, GROUPS, -1), axis=-1)[..., -2:].sum(-1)
        choice = np.where(expand(keep_best(best_two, TOP_GROUPS)), choice, -np.inf)
    chosen = np.where(keep_best(choice, TOP_K), scores, 0)
    total = chosen.sum(1, keepdims=True) if normalize else 1
    np.testing.assert_allclose(by_expert(ids, weights), chosen / total * 2.5, rtol=1e-5, atol=1e-7)


def test_a_negative_bias_does_not_let_an_expert_of_another_group_in() -> None:
    # All choices are negative, so that a mask of zeros would be the larger score.
    logits, bias = np.zeros((1, 4), np.float32), np.array([-3, -3, -9, -9], np.float32)
    ids, _ = call(
        "RouteSigmoidGrouped",
        logits,
        bias,
        top_k=[2],
        num_groups=[2],
        top_groups=[1],
        scaling_factor=1.0,
        normalize=1.0,
    )
    assert sorted(ids[0]) == [0, 1]


def test_exactly_top_groups_are_kept_when_scores_tie() -> None:
    kept = call("KeepGroups", np.ones((5, 8), np.float32), top_groups=[3])[0]
    assert kept.shape == (5, 8, 1)
    assert kept.sum(1).tolist() == [[3]] * 5


def test_experts_sum_the_weighted_mlps_of_the_chosen() -> None:
    hidden, size = 6, 4
    x, gate, up = (
        normal(TOKENS, hidden),
        normal(EXPERTS, size, hidden),
        normal(EXPERTS, size, hidden),
    )
    down = normal(EXPERTS, hidden, size)
    ids = np.argsort(normal(TOKENS, EXPERTS), axis=1)[:, :TOP_K]
    weights = normal(TOKENS, TOP_K)
    weights[0, 0] = 0
    gate_up = np.stack([gate, up], axis=2).reshape(EXPERTS, 2 * size, hidden)
    got = call("Experts", x, ids, weights, gate_up, down, num_experts=[EXPERTS], top_k=[TOP_K])[0]
    for token in range(TOKENS):
        want = sum(
            weight * down[e] @ (silu(gate[e] @ x[token]) * (up[e] @ x[token]))
            for e, weight in zip(ids[token], weights[token], strict=True)
        )
        np.testing.assert_allclose(got[token], want, rtol=1e-4, atol=1e-4)
