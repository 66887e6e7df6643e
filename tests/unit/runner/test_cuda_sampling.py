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
from deepseek_triton.runner.cuda_sampling import choose, greedy, unpack  # noqa: E402
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


def test_greedy_refuses_what_the_sampler_refuses() -> None:
    logits = torch.randn(4, VOCAB)
    logits[0, 7], logits[1, 3], logits[2] = float("nan"), float("inf"), 0.0
    token_ids, _ = unpack(greedy(logits))
    want, _ = sample(logits.numpy(), [ROWS[2]] * 4)
    assert token_ids.tolist() == want.tolist()
    assert token_ids[:3].tolist() == [-1, -1, -1]
