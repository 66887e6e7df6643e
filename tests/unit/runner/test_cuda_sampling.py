"""What the device draws is what the host's sampler draws; the kernels run in the interpreter."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from deepseek_triton.kernels.launch import launches_in_turn  # noqa: E402
from deepseek_triton.request import SamplingParams  # noqa: E402
from deepseek_triton.runner.base import RowSampling  # noqa: E402
from deepseek_triton.runner.cuda_sampling import (  # noqa: E402
    choose,
    greedy,
    refuse_overflowed,
    unpack,
)
from deepseek_triton.runner.sampler import sample  # noqa: E402

VOCAB = 300
RNG = np.random.default_rng(3)
NO_TOKENS = np.zeros(0, np.int32)


def tokens(count: int) -> np.ndarray:
    return RNG.integers(0, VOCAB, count).astype(np.int32)


def row(uniform: float = 0.0, banned: tuple[int, ...] = (), **params: float) -> RowSampling:
    settings = SamplingParams(return_log_probs=True, **params)  # type: ignore[arg-type]
    first, more = (banned[0], banned[1:]) if banned else (None, ())
    return RowSampling(settings, uniform, first, tokens(50), tokens(20), more)


ROWS = [
    row(0.37, temperature=0.8, top_k=40, top_p=0.9),
    row(0.6, (5, 7, 9), temperature=1.0, repetition_penalty=1.3, presence_penalty=0.2),
    row(),
    row(0.0, (3,), repetition_penalty=2.0, frequency_penalty=0.1),
]


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], [ROWS[2], ROWS[0]]], ids=len)
def test_a_choice_on_the_device_is_the_choice_on_the_host(
    rows: list[RowSampling], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        logits = torch.from_numpy(RNG.normal(0, 3, (len(rows), VOCAB)).astype(np.float32))
        want_ids, want_log_probs = sample(logits.numpy(), rows)
        with monkeypatch.context() as patch, launches_in_turn():
            patch.setattr(torch.Tensor, "is_cuda", True)  # takes the kernels
            token_ids, log_probs = unpack(choose(logits, rows))
        assert token_ids.tolist() == want_ids.tolist()
        np.testing.assert_allclose(log_probs, want_log_probs, atol=1e-4)


def test_a_row_with_a_guide_is_drawn_on_the_host() -> None:
    allowed = np.zeros(-(-VOCAB // 32), np.uint32)
    allowed[2] = 1 << 5  # token 69 alone
    guided = dataclasses.replace(ROWS[0], allowed=allowed)
    token_ids, _ = unpack(choose(torch.randn(2, VOCAB), [guided, ROWS[2]]))
    assert token_ids[0] == 69


NASTY = (
    "usual", "nan", "all nan", "+inf", "all +inf", "-inf in places", "all -inf", "one finite",
    "a nan among -inf", "zeros", "-zeros", "zeros but one", "zeros below -inf", "largest",
)  # fmt: skip
KINDS = [
    row(),
    row(0.5, temperature=1.0),
    row(0.9, temperature=0.7, top_k=5),
    row(0.2, temperature=1.3, top_p=0.8),
    row(0.7103, (4, 5), temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5),
    row(0.4, repetition_penalty=1e-30, frequency_penalty=0.5),  # a logit seen before overflows
]


def nasty_logits(vocab: int) -> torch.Tensor:
    """One row for each of NASTY; what is odd lies in the middle and at the end."""
    logits = torch.from_numpy(RNG.normal(0, 3, (len(NASTY), vocab)).astype(np.float32))
    middle, last, inf = vocab // 2, vocab - 1, float("inf")
    for name, values in zip(NASTY, logits, strict=True):
        everywhere = {"all nan": np.nan, "all +inf": inf, "zeros": 0.0, "-zeros": -0.0}
        everywhere |= {"one finite": -inf, "a nan among -inf": -inf, "all -inf": -inf}
        everywhere |= {"zeros but one": 0.0, "zeros below -inf": -inf}
        if name in everywhere:
            values.fill_(everywhere[name])
        if name in ("nan", "a nan among -inf"):
            values[last] = np.nan
        elif name == "+inf":
            values[[middle, last]] = inf
        elif name == "-inf in places":
            values[:middle] = -inf
        elif name == "one finite":
            values[last] = -7.0
        elif name == "zeros but one":
            values[last] = -1.0
        elif name == "zeros below -inf":
            values[middle:] = 0.0
        elif name == "largest":
            values[[middle, last]] = float(np.finfo(np.float32).max)
    return logits


@pytest.mark.parametrize("on_device", [False, True], ids=["pytorch", "kernels"])
@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("vocab", [VOCAB, 5000])  # 5000: several programs a row
def test_rows_that_are_not_finite_are_refused_as_on_the_host_and_harm_no_other(
    vocab: int, kind: int, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, rows = nasty_logits(vocab), [KINDS[kind]] * len(NASTY)
    before = logits.clone()
    want_ids, want_log_probs = sample(logits.numpy(), rows)
    with monkeypatch.context() as patch, launches_in_turn():
        patch.setattr(torch.Tensor, "is_cuda", on_device)
        plain = KINDS[kind].plain
        token_ids, log_probs = unpack(greedy(logits) if plain else choose(logits, rows))
    assert token_ids.tolist() == want_ids.tolist(), NASTY
    given = want_ids >= 0
    np.testing.assert_allclose(log_probs[given], want_log_probs[given], atol=1e-4)
    assert np.isnan(log_probs[~given]).all()
    np.testing.assert_array_equal(logits.numpy(), before.numpy())
    refused = {"nan", "all nan", "+inf", "all +inf", "all -inf", "a nan among -inf"}
    refused |= {"zeros", "-zeros"}
    if not KINDS[kind].params.penalized:
        assert {name for name, fits in zip(NASTY, given, strict=True) if not fits} == refused


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_row_with_any_token_that_overflowed_is_refused_and_no_other(value: float) -> None:
    ends = torch.tensor([0, 3, 4, 8, 8, 8], dtype=torch.int32)  # two rows of a bucket are unused
    for token, refused in ((0, [0]), (2, [0]), (3, [1]), (4, [2]), (7, [2]), (9, [])):
        norms = torch.rand(10, 1)
        norms[token] = value
        packed = torch.arange(10, dtype=torch.int32).view(2, 5)
        refuse_overflowed(packed, norms, ends)
        assert [i for i in range(5) if packed[0, i] < 0] == refused
        assert packed[1].tolist() == [5, 6, 7, 8, 9]
