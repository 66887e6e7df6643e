import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton.request import SamplingParams
from deepseek_triton.runner.base import RowSampling
from deepseek_triton.runner.sampler import sample, score, top_log_probs

NONE = np.empty(0, np.int32)


def row(uniform=0.5, banned_id=None, prompt=(), output=(), more_banned_ids=(), **params):
    return RowSampling(
        params=SamplingParams(**params),
        uniform=uniform,
        banned_id=banned_id,
        prompt_token_ids=np.array(prompt, np.int32),
        output_token_ids=np.array(output, np.int32),
        more_banned_ids=more_banned_ids,
    )


def sample_one(logits, sampling):
    token_ids, log_probs = sample(np.asarray(logits, np.float32)[None], [sampling])
    return int(token_ids[0]), float(log_probs[0])


def adjusted(logits, sampling):
    """The logits after penalties and bans, token by token."""
    params = sampling.params
    prompt, output = sampling.prompt_token_ids.tolist(), sampling.output_token_ids.tolist()
    values = [np.float32(x) for x in logits]
    for token in range(len(values)):
        if token in prompt or token in output:
            penalty = np.float32(params.repetition_penalty)
            positive = values[token] > 0
            values[token] = values[token] / penalty if positive else values[token] * penalty
        if token in output:
            subtract = params.presence_penalty + params.frequency_penalty * output.count(token)
            values[token] -= np.float32(subtract)
        if token == sampling.banned_id or token in sampling.more_banned_ids:
            values[token] = np.float32(-np.inf)
    return values


def reference(logits, sampling):
    """The definition, with full sorts and plain sums."""
    params, values = sampling.params, adjusted(logits, sampling)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.greedy:
        return order[0]
    order = order[: params.top_k or None]
    peak, temperature = values[order[0]], np.float32(params.temperature)
    weights = {t: float(np.exp((values[t] - peak) / temperature)) for t in order}
    kept, so_far, total = [], 0.0, sum(weights.values())
    for token in order:
        kept.append(token)
        so_far += weights[token]
        if so_far >= params.top_p * total:
            break
    target, so_far = sampling.uniform * sum(weights[t] for t in kept), 0.0
    for token in sorted(kept):
        so_far += weights[token]
        if so_far > target:
            return token
    raise RuntimeError("nothing drawn")


PARAMS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.8},
    {"temperature": 1.5, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 1.0, "top_p": 0.999},
    {"repetition_penalty": 1.7},
    {"temperature": 0.8, "repetition_penalty": 0.6, "top_p": 0.7},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"temperature": 1.0, "top_k": 30, "presence_penalty": -2.0, "frequency_penalty": 1.0},
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("vocab_size", [7, 300, 5000])
def test_the_token_is_the_one_of_the_definition(params, vocab_size):
    generator = np.random.default_rng(vocab_size)
    for _ in range(10):
        logits = generator.normal(0, 3, vocab_size).astype(np.float32)
        sampling = row(
            uniform=generator.random(),
            banned_id=int(generator.integers(vocab_size)),
            prompt=generator.integers(0, vocab_size, 20),
            output=generator.integers(0, vocab_size, 9),
            **params,
        )
        assert sample_one(logits, sampling)[0] == reference(logits, sampling)


# Few distinct values make ties; float sums of equal weights leave no room for rounding.
@settings(max_examples=300, deadline=None)
@given(
    values=st.lists(st.sampled_from([-math.inf, -2.0, 0.0, 1.0]), min_size=1, max_size=200),
    uniform=st.floats(0, 1, exclude_max=True),
    temperature=st.sampled_from([0.5, 1.0, 4.0]),
    top_k=st.integers(0, 250),
    top_p=st.sampled_from([0.0, 0.21, 0.55, 0.93, 1.0]),
)
def test_ties_and_impossible_tokens_follow_the_definition(
    values, uniform, temperature, top_k, top_p
):
    values[0] = 1.0
    sampling = row(uniform=uniform, temperature=temperature, top_k=top_k, top_p=top_p)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        token, _ = sample_one(values, sampling)
    assert token == reference(values, sampling)
    assert values[token] > -math.inf


def test_ties_in_a_large_vocabulary_follow_the_definition():
    logits = np.random.default_rng(3).integers(0, 4, 4096).astype(np.float32)
    for params in ({"top_k": 50}, {"top_k": 3000}, {"top_p": 0.43}, {"top_p": 0.97}):
        for uniform in (0.0, 0.31, 0.77, np.nextafter(1.0, 0.0)):
            sampling = row(uniform=uniform, temperature=1.0, **params)
            assert sample_one(logits, sampling)[0] == reference(logits, sampling)


def test_greedy_takes_the_first_of_the_largest():
    assert sample_one([1.0, 3.0, 3.0, 2.0], row())[0] == 1


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 0.0}, {"temperature": 0.0}])
def test_three_ways_to_ask_for_greedy(params):
    logits = np.random.default_rng(0).normal(size=500)
    sampling = row(uniform=0.999, **{"temperature": 5.0, **params})
    assert sample_one(logits, sampling)[0] == int(np.argmax(logits))


@pytest.mark.parametrize("params", [{"top_k": 9_999_999}, {"top_k": 4}, {"top_p": 1.0}])
def test_limits_that_exclude_nothing_change_nothing(params):
    logits = [0.1, 0.2, 0.3, 0.4]
    for uniform in np.linspace(0, 0.999, 40):
        plain, _ = sample_one(logits, row(uniform=uniform, temperature=1.0))
        assert sample_one(logits, row(uniform=uniform, temperature=1.0, **params))[0] == plain


def test_a_vocabulary_of_one_token():
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "top_k": 3}):
        assert sample_one([2.0], row(return_log_probs=True, **params)) == (0, 0.0)


@pytest.mark.parametrize("temperature", [1e-5, 1e-12, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature):
    assert sample_one([1.0, 1.01, -5.0], row(uniform=0.9, temperature=temperature))[0] == 1


def test_extreme_uniforms_stay_inside_the_possible_tokens():
    logits = [-math.inf, 0.0, 1.0, -math.inf, -math.inf]
    last = np.nextafter(1.0, 0.0)
    assert sample_one(logits, row(uniform=0.0, temperature=1.0))[0] == 1
    assert sample_one(logits, row(uniform=last, temperature=1.0))[0] == 2


def test_banned_ids_are_never_chosen():
    logits = [5.0, 4.0, 1.0]
    assert sample_one(logits, row(banned_id=0))[0] == 1
    assert sample_one(logits, row(banned_id=0, more_banned_ids=(1,)))[0] == 2
    for uniform in np.linspace(0, 0.999, 20):
        assert sample_one(logits, row(uniform=uniform, banned_id=0, temperature=9.0))[0] > 0
    assert sample_one(logits, row(banned_id=77))[0] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_k": 2, "return_log_probs": True}])
def test_a_row_that_is_not_finite_gives_no_token_and_harms_no_other(bad, params):
    logits = np.zeros((3, 100), np.float32)
    logits[:, 7] = 50.0
    logits[1, 60] = bad
    token_ids, log_probs = sample(logits, [row(**params)] * 3)
    assert token_ids.tolist() == [7, -1, 7]
    assert math.isnan(log_probs[1])


def test_logits_that_are_all_zero_are_an_overflow_and_not_token_0():
    logits = np.zeros((3, 100), np.float32)
    logits[0, 5], logits[2, 5] = 1e-3, -1e-3
    token_ids, _ = sample(logits, [row()] * 3)
    assert token_ids.tolist() == [5, -1, 0]


def test_scores_are_the_log_softmax_of_given_tokens():
    logits = np.random.default_rng(0).normal(0, 3, (4, 50)).astype(np.float32)
    logits[1, 3] = math.nan
    logits[2] = 0
    ids = np.array([1, 2, 3, 49])
    log_probs, best_ids = score(logits, ids)
    wide = logits.astype(np.float64)
    for i in (0, 3):
        expected = wide[i, ids[i]] - np.log(np.exp(wide[i]).sum())
        assert log_probs[i] == pytest.approx(expected, abs=1e-6)
        assert best_ids[i] == wide[i].argmax()
    assert np.isnan(log_probs[1:3]).all()
    assert best_ids[1:3].tolist() == [-1, -1]


def test_a_row_without_a_possible_token_gives_none():
    assert sample_one([-math.inf, -math.inf], row())[0] == -1
    assert sample_one([1.0], row(banned_id=0, temperature=1.0))[0] == -1


def test_log_probs_are_those_of_the_unmodified_logits():
    generator = np.random.default_rng(5)
    logits = generator.normal(0, 4, (6, 3000)).astype(np.float32)
    logits[5] += 1e4
    rows = [
        row(return_log_probs=True),
        row(return_log_probs=True, temperature=2.0, uniform=0.9),
        row(return_log_probs=True, repetition_penalty=5.0, prompt=range(1000)),
        row(return_log_probs=True, banned_id=int(logits[3].argmax())),
        row(),
        row(return_log_probs=True, temperature=1.0, top_k=3),
    ]
    token_ids, log_probs = sample(logits, rows)
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    for i in (0, 1, 2, 3, 5):
        assert log_probs[i] == pytest.approx(exact[i, token_ids[i]], abs=2e-5)
        assert log_probs[i] <= 0
    assert math.isnan(log_probs[4])


def test_a_certain_token_has_log_prob_zero_not_more():
    assert sample_one([1000.0, -1000.0], row(return_log_probs=True)) == (0, 0.0)


def test_logits_are_not_modified():
    logits = np.random.default_rng(1).normal(size=(1, 3000)).astype(np.float32)
    before = logits.copy()
    sample(logits, [row(temperature=1.0, top_p=0.9, banned_id=3, presence_penalty=2.0, output=[5])])
    assert np.array_equal(logits, before)


def test_a_row_does_not_depend_on_its_neighbours():
    generator = np.random.default_rng(2)
    logits = generator.normal(size=(8, 4000)).astype(np.float32)
    rows = [row(uniform=u, temperature=1.0, top_p=0.9) for u in generator.random(8)]
    together = sample(logits, rows)[0].tolist()
    order = generator.permutation(8)
    assert sample(logits[order], [rows[i] for i in order])[0].tolist() == [
        together[i] for i in order
    ]
    assert [sample_one(logits[i], rows[i])[0] for i in range(8)] == together


def test_no_rows_give_no_tokens():
    token_ids, log_probs = sample(np.empty((0, 10), np.float32), [])
    assert token_ids.shape == log_probs.shape == (0,)


@pytest.mark.parametrize(
    "params",
    [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 6}, {"temperature": 1.0, "top_p": 0.8}],
)
def test_draws_follow_the_distribution(params):
    """Chi-square over 4,000 draws; the bound is its 99.9% quantile for up to 11 degrees."""
    logits = np.random.default_rng(9).normal(0, 1.2, 12).astype(np.float32)
    draws = 4000
    uniforms = np.random.Generator(np.random.Philox(11)).random(draws)
    token_ids, _ = sample(np.tile(logits, (draws, 1)), [row(uniform=u, **params) for u in uniforms])
    order = np.argsort(-logits)[: params.get("top_k", 12)]
    weights = np.exp(logits[order].astype(np.float64) / params["temperature"])
    share = np.cumsum(weights) / weights.sum()
    kept = order[: int(np.searchsorted(share, params.get("top_p", 1.0))) + 1]
    expected = np.zeros(12)
    expected[kept] = np.exp(logits[kept].astype(np.float64) / params["temperature"])
    expected *= draws / expected.sum()
    counts = np.bincount(token_ids, minlength=12)
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 31.3


def mask(vocab_size, *allowed):
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def test_only_allowed_tokens_are_drawn_and_log_probs_stay_those_of_the_model():
    logits = np.random.default_rng(5).normal(0, 3, 100).astype(np.float32)
    allowed = [3, 31, 32, 64, 99]
    for params in ({}, {"temperature": 1.0}, {"temperature": 2.0, "top_k": 2}, {"top_p": 0.5}):
        for uniform in (0.0, 0.4, 0.99):
            sampling = replace(
                row(uniform=uniform, return_log_probs=True, **params), allowed=mask(100, *allowed)
            )
            token, log_prob = sample_one(logits, sampling)
            kept = np.full(100, -np.inf, np.float32)
            kept[allowed] = logits[allowed]
            assert token == reference(kept, replace(sampling, allowed=None))
            expected = logits[token] - np.log(np.exp(logits.astype(np.float64)).sum())
            assert log_prob == pytest.approx(expected, abs=1e-5)


def test_no_token_is_drawn_when_none_is_allowed():
    assert sample_one([1.0, 2.0], replace(row(), allowed=mask(2)))[0] == -1


def test_a_bias_is_added_before_penalties():
    logits = [0.0, 1.0, -1.0]
    assert sample_one(logits, row(logit_bias=((2, 3.0),)))[0] == 2
    assert sample_one(logits, row(logit_bias=((1, -100.0), (2, -100.0))))[0] == 0
    biased = row(logit_bias=((2, 3.0),), repetition_penalty=4.0, output=[2])
    assert sample_one(logits, biased)[0] == 1  # (−1 + 3) / 4 < 1


def test_the_likeliest_tokens_are_those_of_a_full_sort():
    logits = np.random.default_rng(6).integers(-3, 3, (3, 500)).astype(np.float32)
    logits[2, 7] = np.nan
    found = top_log_probs(logits, [5, 0, 3])
    order = np.argsort(-logits[0], kind="stable")[:5]
    assert [token for token, _ in found[0]] == order.tolist()
    expected = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    assert [value for _, value in found[0]] == pytest.approx(expected[order].tolist(), abs=1e-5)
    assert found[1:] == ((), ())
    assert top_log_probs(logits, [0, 0, 0]) == ()
    assert [token for token, _ in top_log_probs(logits[:1, :3], [20])[0]] == sorted(
        range(3), key=lambda token: -logits[0, token]
    )
