from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from deepseek_triton.errors import ConfigError
from deepseek_triton.evaluate import perplexity
from deepseek_triton.evaluate.perplexity import (
    Scores,
    agreement,
    continue_greedily,
    cut_windows,
    score_windows,
)
from deepseek_triton.kv_cache.spec import KVCacheSpec
from deepseek_triton.runner.base import RowScores, StepResult, StepRow
from deepseek_triton.runner.sampler import score

VOCAB = 11


@dataclass
class CountingModel:
    """A runner whose model expects token t + 1 after t, with logits that depend on the context."""

    num_blocks: int = 8
    vocab_size: int = VOCAB
    kv_cache_spec: KVCacheSpec = field(default_factory=lambda: KVCacheSpec(1, 4, 4))
    cache: dict[int, int] = field(default_factory=dict)
    bad: bool = False

    def logits(self, row: StepRow) -> NDArray[np.float32]:
        """Write the row's tokens to the cache; return the logits after each."""
        for i, token in enumerate(row.token_ids.tolist(), row.context_len):
            self.cache[int(row.block_table[i // 4]) * 4 + i % 4] = token
        seen = range(row.context_len, row.context_len + len(row.token_ids))
        logits = np.zeros((len(row.token_ids), VOCAB), np.float32)
        for index, i in enumerate(seen):
            slots = [int(row.block_table[j // 4]) * 4 + j % 4 for j in range(i + 1)]
            total = sum(self.cache[slot] for slot in slots)
            logits[index, (self.cache[slots[-1]] + 1) % VOCAB] = 1 + total % 3
        return np.full_like(logits, np.nan) if self.bad else logits

    def score(self, rows: tuple[StepRow, ...]) -> tuple[RowScores, ...]:
        return tuple(
            RowScores(*score(self.logits(r), np.array([*r.token_ids[1:], r.next_token_id])))
            for r in rows
        )

    def run(self, rows: tuple[StepRow, ...]) -> StepResult:
        ids = [int(self.logits(row)[-1].argmax()) for row in rows]
        return StepResult(np.array(ids, np.int32), np.zeros(len(rows), np.float32))

    def close(self) -> None:
        """Nothing is held."""


def by_hand(window: list[int]) -> list[float]:
    log_probs = []
    for i in range(len(window) - 1):
        peak = 1 + sum(window[: i + 1]) % 3
        total = math.exp(peak) + VOCAB - 1
        hit = window[i + 1] == (window[i] + 1) % VOCAB
        log_probs.append((peak if hit else 0) - math.log(total))
    return log_probs


WINDOWS = np.random.default_rng(0).integers(0, VOCAB, (3, 14)).astype(np.int32)
WINDOWS[1] = np.arange(14) % VOCAB


@pytest.mark.parametrize("chunk", [1, 5, 256])
def test_every_token_but_the_first_is_scored_whatever_the_chunks(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(perplexity, "_CHUNK", chunk)
    scores = score_windows(CountingModel(), WINDOWS)
    expected = np.array([by_hand(window.tolist()) for window in WINDOWS])
    np.testing.assert_allclose(scores.log_probs, expected, atol=1e-6)
    assert scores.loss == pytest.approx(-expected.mean(), abs=1e-6)
    error = expected.mean(axis=1).std(ddof=1) / math.sqrt(3)
    assert scores.standard_error == pytest.approx(error, rel=1e-4)
    np.testing.assert_array_equal(scores.best_ids, (WINDOWS[:, :-1] + 1) % VOCAB)


def test_windows_are_spread_evenly_and_cover_the_text_when_all_are_taken() -> None:
    tokens = np.arange(101, dtype=np.int32)
    every = cut_windows(tokens, 10, 99)
    assert every.shape == (10, 11)
    np.testing.assert_array_equal(np.concatenate(every[:, 1:]), np.arange(1, 101))
    np.testing.assert_array_equal(cut_windows(tokens, 10, 3)[:, 0], [0, 40, 90])
    with pytest.raises(ConfigError, match="has 10 tokens, one window takes 11"):
        cut_windows(tokens[:10], 10, 1)


def test_agreement_is_the_share_of_equal_choices() -> None:
    ids = np.array([[1, 2, 3, 4]], np.int32)
    other = np.array([[1, 2, 9, 4]], np.int32)
    zeros = np.zeros((1, 4), np.float32)
    assert agreement(Scores(zeros, ids), Scores(zeros, other)) == 0.75


def test_the_continuation_is_the_likeliest_token_after_each() -> None:
    prompts = WINDOWS[:, :5]
    found = continue_greedily(CountingModel(), prompts, 7)
    np.testing.assert_array_equal(found, (prompts[:, -1:] + 1 + np.arange(7)) % VOCAB)


def test_scores_that_are_not_finite_are_an_error_with_advice() -> None:
    with pytest.raises(ConfigError, match="engine-16 gave logits .* PRECISION=fp32"):
        score_windows(CountingModel(bad=True), WINDOWS, "engine-16")


def test_windows_that_do_not_fit_the_pool_are_refused() -> None:
    with pytest.raises(ConfigError, match="13 tokens take 4 KV blocks of 2"):
        score_windows(CountingModel(num_blocks=2), WINDOWS)


@pytest.mark.parametrize(("length", "count", "name"), [(0, 3, "window-length"), (10, 0, "windows")])
def test_windows_of_nothing_are_refused_by_name(length: int, count: int, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: 0; at least 1 is needed"):
        cut_windows(np.arange(99, dtype=np.int32), length, count)
