"""The ModelRunner seam: one step of a batch in, one token per asking row out.

The engine decides *what* runs (scheduler) and hands over plain numbers; a runner owns the model,
the KV pools and the sampling, so that a GPU runner can keep logits on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.kv_cache.spec import KVCacheSpec
from deepseek_triton.request import RequestKey, SamplingParams, TopLogProbs


@dataclass(frozen=True)
class RowSampling:
    """What the sampler needs to draw one row's next token."""

    params: SamplingParams
    uniform: float  # in [0, 1), from the request's own generator; unused when greedy
    banned_id: int | None  # the end id while min_tokens is not reached
    prompt_token_ids: NDArray[np.int32]  # [P]; read only when params.penalized
    output_token_ids: NDArray[np.int32]  # [O]; read only when params.penalized
    more_banned_ids: tuple[int, ...] = ()  # banned as well: a request may have several end ids
    allowed: NDArray[np.uint32] | None = None  # bit i % 32 of word i // 32: token i may come

    @property
    def plain(self) -> bool:
        """Whether the likeliest token of the unmodified logits is the answer."""
        params = self.params
        bans = self.banned_id is not None or bool(self.more_banned_ids)
        changed = params.penalized or bool(params.logit_bias) or bans or self.allowed is not None
        return params.greedy and not changed


@dataclass(frozen=True)
class StepRow:
    """One request's share of a step."""

    request_key: RequestKey
    token_ids: NDArray[np.int32]  # [n ≥ 1] tokens whose KV this step computes
    context_len: int  # tokens already in the cache; token_ids[0] sits at this position
    block_table: NDArray[np.int32]  # [m] block ids; m · block_size ≥ context_len + n
    sampling: RowSampling | None  # None: a prefill chunk that is not the last; no token wanted
    # The rest is for runners with a draft model alone.
    draft_token_ids: tuple[int, ...] = ()  # [d] guesses of the tokens after token_ids
    draft_sampling: tuple[RowSampling, ...] = ()  # [d] for the token after each draft, if it holds
    next_token_id: int = -1  # the known token after token_ids when there is no sampling


@dataclass(frozen=True)
class Speculation:
    """What drafts brought to one row of a step."""

    token_ids: tuple[int, ...] = ()  # drawn after the row's first token: one for each right draft
    log_probs: tuple[float, ...] = ()  # of these
    draft_token_ids: tuple[int, ...] = ()  # guesses of the tokens after all of them


@dataclass(frozen=True)
class StepResult:
    """Aligned with the rows of the step; rows without sampling hold −1 and NaN.

    A row that asked for a token and holds −1 has no token that could be chosen: its logits are not
    finite (NaN, +Inf, or all −Inf) or all 0. A row in `overflowed`, whether it asked or not, has
    such a token among those whose logits nobody asked for: later ones attend to it, so a token that
    the row holds means nothing. The engine ends such a request alone with an error.
    """

    token_ids: NDArray[np.int32]  # [B]
    log_probs: NDArray[
        np.float32
    ]  # [B] natural log-softmax of the unmodified logits; NaN unless asked
    speculation: tuple[Speculation, ...] = ()  # [B], or empty from a runner without a draft model
    top_log_probs: tuple[TopLogProbs, ...] = ()  # [B], of the unmodified logits; empty: none asked
    overflowed: tuple[int, ...] = ()  # indices of rows


class ModelRunner(Protocol):
    """Runs steps on one model. Not thread-safe: one thread calls it."""

    @property
    def vocab_size(self) -> int:
        """Number of logits."""

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """Geometry of the pools."""

    @property
    def num_blocks(self) -> int:
        """Blocks that the scheduler may hand out: ids 0 … num_blocks − 1."""

    def run(self, rows: tuple[StepRow, ...]) -> StepResult:
        """Compute KV of each row's tokens, write it into the pools, and sample where asked.

        A draft is right if the token drawn in its place equals it; so drafts never change what a
        request gets. Only rows of a runner that returned drafts have any.

        Rows may mix prefill chunks and decodes; the runner groups them as suits it. The result of a
        row depends on that row alone. Mutates the KV pools. Raises RequestFailedError when one row
        is at fault and the others may run again without it; anything else ends the engine.
        """

    def close(self) -> None:
        """Free the model and the pools; idempotent."""


@dataclass(frozen=True)
class FollowingRow:
    """A row of the step after this one, whose only token is the one that a row of this step draws.

    That token is not known yet: `row.token_ids` [1] holds anything.
    """

    source: int  # index of the row that draws it
    row: StepRow


@runtime_checkable
class WaitingRunner(ModelRunner, Protocol):
    """A runner whose `run` waits for a device."""

    meanwhile: Callable[[], None]
    """To be set: `run` calls it once the device works, and before a launch that takes long."""

    def run(
        self, rows: tuple[StepRow, ...], following: tuple[FollowingRow, ...] = ()
    ) -> StepResult:
        """See ModelRunner.run. The device may begin with `following` before this step returns.

        So it never waits for the host between two steps. The next call takes what was computed for
        those of its rows that are the same, and the rest is lost: a row that has ended does no
        harm, since what it wrote to its KV blocks comes before all that their next owner writes.
        """


@dataclass(frozen=True)
class RowScores:
    """What a model thinks of the tokens that follow in one row."""

    log_probs: NDArray[np.float32]  # [n] natural log-softmax at the token after each one
    best_ids: NDArray[np.int32]  # [n] the likeliest token after each one; −1 where none is finite


class ScoringRunner(ModelRunner, Protocol):
    """A runner that can also score given tokens, which evaluation asks for."""

    def score(self, rows: tuple[StepRow, ...]) -> tuple[RowScores, ...]:
        """Compute KV as `run` does; score token_ids[1:] and next_token_id after their predecessors.

        Rows have no sampling and no drafts. A score that is not finite is NaN. Mutates the KV
        pools.
        """
