"""The device sampler against the host's, runner/sampler.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from deepseek_triton.kernels.sampling import IN_PROMPT, sample, sampling_row
from deepseek_triton.request import SamplingParams
from deepseek_triton.runner.base import RowSampling
from deepseek_triton.runner.sampler import sample as host_sample

PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.5),
    SamplingParams(temperature=2.0, top_k=1),
    SamplingParams(temperature=1e-9, top_p=0.9),
)


def logits_of(rows: int, vocab: int, seed: int, *, ties: bool = False) -> np.ndarray:
    logits = np.random.default_rng(seed).standard_normal((rows, vocab)) * 3
    return (logits.round() if ties else logits).astype(np.float32)


def both(
    logits: np.ndarray,
    params: tuple[SamplingParams, ...],
    uniforms: np.ndarray,
    *,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return (ids, log probs) of the device and of the host."""
    seen = np.array(prompt, np.int32), np.array(output, np.int32)
    rows = [
        RowSampling(replace(p, return_log_probs=True), float(u), None, *seen, banned)
        for p, u in zip(params, uniforms, strict=True)
    ]
    counts = torch.zeros(logits.shape, dtype=torch.int32)
    for token in output:
        counts[:, token] += 1
    counts[:, list(prompt)] += IN_PROMPT
    packed = sample(
        torch.from_numpy(logits),
        torch.tensor([sampling_row(row.params, row.uniform) for row in rows]),
        token_counts=counts if any(p.penalized for p in params) else None,
        banned=torch.tensor([banned] * len(rows), dtype=torch.int32) if banned else None,
    )
    device = packed[0].numpy(), packed[1].view(torch.float32).numpy()
    return device, host_sample(logits, rows)


def assert_same(results: tuple[tuple[np.ndarray, np.ndarray], ...]) -> None:
    (ids, log_probs), (host_ids, host_log_probs) = results
    np.testing.assert_array_equal(ids, host_ids)
    np.testing.assert_allclose(log_probs, host_log_probs, atol=1e-5)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("vocab", "seeds"), [(50, 2), (5000, 1)])
def test_draws_the_host_s_tokens(vocab: int, seeds: int, ties: bool) -> None:
    for seed in range(seeds):
        uniforms = np.random.default_rng(seed).random(len(PARAMS)).astype(np.float32)
        assert_same(both(logits_of(len(PARAMS), vocab, seed, ties=ties), PARAMS, uniforms))


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-24])
def test_the_ends_of_the_draw(uniform: float) -> None:
    assert_same(both(logits_of(7, 60, 1), PARAMS, np.full(7, uniform, np.float32)))


def test_penalties_and_bans() -> None:
    params = (
        SamplingParams(temperature=1.0, repetition_penalty=1.3),
        SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.7),
        SamplingParams(repetition_penalty=2.0, frequency_penalty=-0.5),
    )
    uniforms = np.array([0.2, 0.6, 0.0], np.float32)
    seen = {"prompt": (1, 2, 3), "output": (2, 5, 5, 9)}
    assert_same(both(logits_of(3, 40, 3), params, uniforms, **seen, banned=(7, -1, 11)))


def test_a_banned_favourite_is_not_drawn_but_log_probs_stay_those_of_the_model() -> None:
    logits = logits_of(1, 40, 4)
    favourite = int(logits.argmax())
    results = both(logits, (SamplingParams(),), np.zeros(1), banned=(favourite,))
    assert results[0][0][0] != favourite
    assert_same(results)


def test_rows_without_an_answer_get_none() -> None:
    logits = torch.randn(5, 300)
    logits[0] = 0.0
    logits[1, 5] = float("nan")
    logits[2, 7] = float("inf")
    logits[3] = float("-inf")
    rows = torch.tensor([sampling_row(SamplingParams(temperature=1.0), 0.5)] * 5)
    for chosen in (sample(logits), sample(logits, rows)):
        assert chosen[0, :4].tolist() == [-1] * 4
        assert bool(chosen[1, :4].view(torch.float32).isnan().all())
        assert chosen[0, 4] >= 0


def test_banning_everything_leaves_no_token() -> None:
    banned = torch.arange(4, dtype=torch.int32)[None]
    assert sample(torch.randn(1, 4), banned=banned)[0].tolist() == [-1]


def test_greedy_over_several_chunks_takes_the_first_of_equals() -> None:
    logits = torch.zeros(2, 5000)
    logits[0, [4999, 2050, 3000]] = 1.5
    logits[1, 4999] = 1.0
    assert sample(logits)[0].tolist() == [2050, 4999]


def test_narrow_types_are_read_as_they_are() -> None:
    logits = torch.randn(2, 100).half()
    chosen = sample(logits)
    assert chosen[0].tolist() == logits.float().argmax(-1).tolist()
    want = logits.float().log_softmax(-1).amax(-1)
    torch.testing.assert_close(chosen[1].view(torch.float32), want, rtol=1e-5, atol=1e-5)
