"""Scores from a runner that only runs steps: token by token, each the only one allowed.

A step that may draw nothing but the token that follows gives the log prob of that token, since log
probs are those of the unmodified logits; the likeliest token comes along. Slow, and the same for
every target.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.kv_cache.spec import KVCacheSpec
from deepseek_triton.request import SamplingParams
from deepseek_triton.runner.base import ModelRunner, RowSampling, RowScores, StepResult, StepRow

_PARAMS = SamplingParams(return_log_probs=True, top_log_probs=1)
_NONE: NDArray[np.int32] = np.zeros(0, np.int32)


class SteppingScorer:
    """A ScoringRunner around any ModelRunner, which it closes."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self._runner.vocab_size

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """Geometry of the pools."""
        return self._runner.kv_cache_spec

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._runner.num_blocks

    def run(self, rows: tuple[StepRow, ...]) -> StepResult:
        """See ModelRunner.run."""
        return self._runner.run(rows)

    def score(self, rows: tuple[StepRow, ...]) -> tuple[RowScores, ...]:
        """See ScoringRunner.score; a token whose logits are not finite gets NaN and −1."""
        return tuple(self._score(row) for row in rows)

    def close(self) -> None:
        """Free the model and the pools; idempotent."""
        self._runner.close()

    def _score(self, row: StepRow) -> RowScores:
        following = [*row.token_ids[1:].tolist(), row.next_token_id]
        log_probs, best_ids = [], []
        for index, token_id in enumerate(following):
            allowed = np.zeros(-(-self.vocab_size // 32), np.uint32)
            allowed[token_id // 32] = 1 << token_id % 32
            step = StepRow(
                row.request_key,
                row.token_ids[index : index + 1],
                row.context_len + index,
                row.block_table,
                RowSampling(_PARAMS, 0.0, None, _NONE, _NONE, allowed=allowed),
            )
            result = self._runner.run((step,))
            top = result.top_log_probs[0] if result.top_log_probs else ()
            log_probs.append(float(result.log_probs[0]))
            best_ids.append(top[0][0] if top else -1)
        return RowScores(np.array(log_probs, np.float32), np.array(best_ids, np.int32))
