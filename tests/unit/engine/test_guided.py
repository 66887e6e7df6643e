"""Answers kept to a form, and the likeliest tokens: with drafts and without."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from deepseek_triton.request import FinishReason, SamplingParams
from deepseek_triton.runner.base import StepResult
from deepseek_triton.runner.sampler import top_log_probs
from tests.unit.engine.scripted_runner import ScriptedRunner
from tests.unit.engine.test_engine import engine, request, run

VOCAB = 64


@dataclass
class Counting:
    """Allows first, first + 1, …; complete after `length` of them."""

    first: int
    length: int
    taken: list[int] = field(default_factory=list)

    def start(self) -> Counting:
        return Counting(self.first, self.length)

    @property
    def is_complete(self) -> bool:
        return len(self.taken) == self.length

    def allowed(self) -> np.ndarray:
        bits = np.zeros(VOCAB, np.uint8)
        bits[self.first + len(self.taken)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token_id: int) -> str:
        self.taken.append(token_id)
        return "" if len(self.taken) <= self.length else "too many"


class Reporting(ScriptedRunner):
    """Reports the likeliest tokens in the place after the known ones."""

    def run(self, rows):
        result = super().run(rows)
        logits = np.stack([self.logits(row.request_key, self._known(row)) for row in rows])
        counts = [0 if r.sampling is None else r.sampling.params.top_log_probs for r in rows]
        tops = top_log_probs(logits, counts)
        return StepResult(result.token_ids, result.log_probs, result.speculation, tops)

    def _known(self, row):
        size, total = self.kv_cache_spec.block_size, row.context_len + len(row.token_ids)
        positions = np.arange(total)
        return self._tokens[row.block_table[positions // size], positions % size]


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_guided_request_follows_its_guide_to_the_end(num_drafts: int) -> None:
    under_test = engine(runner=ScriptedRunner(64, num_drafts=num_drafts))
    sampled = SamplingParams(temperature=1.0, seed=3)
    guided = request("g", max_tokens=20, sampling=sampled, guide=Counting(10, 5))
    other = request("o", max_tokens=20, sampling=sampled)
    taken, free = run(under_test, guided, other)
    assert taken.tokens == [10, 11, 12, 13, 14]
    assert taken.finish_reason is FinishReason.STOP
    assert free.tokens == run(engine(), other)[0].tokens, "a neighbour is not touched"


def test_a_guided_request_may_be_cut_or_end_by_itself() -> None:
    (cut,) = run(engine(), request(max_tokens=3, guide=Counting(10, 5)))
    assert (cut.tokens, cut.finish_reason) == ([10, 11, 12], FinishReason.LENGTH)
    (ended,) = run(engine(), request(max_tokens=9, guide=Counting(10, 5), end_id=12))
    assert (ended.tokens, ended.finish_reason) == ([10, 11], FinishReason.STOP)


def test_a_preempted_guided_request_goes_on_where_it_was() -> None:
    guides = [Counting(10, 12), Counting(30, 12)]
    requests = [request(str(i), max_tokens=12, guide=guide) for i, guide in enumerate(guides)]
    under_test = engine(num_blocks=6)
    taken = run(under_test, *requests)
    assert under_test.stats().preemptions_total > 0
    assert [t.tokens for t in taken] == [list(range(10, 22)), list(range(30, 42))]


def test_a_guide_that_fails_ends_its_request_with_an_error() -> None:
    class Failing(Counting):
        def start(self) -> Failing:
            return Failing(self.first, self.length)

        def accept(self, token_id: int) -> str:
            return "lost its way"

    broken, healthy = run(engine(), request("b", guide=Failing(10, 5)), request("h"))
    assert broken.finish_reason is FinishReason.ERROR
    assert "lost its way" in str(broken.outputs[-1].error)
    assert healthy.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_likeliest_tokens_come_with_each_token(num_drafts: int) -> None:
    runner = Reporting(64, num_drafts=num_drafts)
    params = SamplingParams(top_log_probs=3, return_log_probs=True)
    asked, plain = run(engine(runner=runner), request("a", sampling=params), request("p"))
    tops = [top for output in asked.outputs for top in output.top_log_probs]
    assert [top[0][0] for top in tops] == asked.tokens  # greedy takes the likeliest
    assert [top[0][1] for top in tops] == pytest.approx(asked.log_probs, abs=1e-6)
    assert all(len(top) == 3 for top in tops)
    assert not any(output.top_log_probs for output in plain.outputs)
