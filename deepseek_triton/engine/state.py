"""One request while it runs: what changes, beside the immutable Request."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.errors import DeepseekTritonError
from deepseek_triton.request import FinishReason, Request, RequestStats, TokenOutput, TopLogProbs
from deepseek_triton.runner.base import RowSampling, StepRow
from deepseek_triton.scheduler import Progress, ScheduledRow

Emit = Callable[[TokenOutput], None]
"""Takes a request's outputs in order. If it raises, that request alone is cancelled."""

_NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)
_UNSEEN: NDArray[np.int32] = np.zeros(1, np.int32)
_ONE_AHEAD = (0,)  # which token it is does not matter to what `may_follow_unseen`


class RequestState:
    """Tokens, random stream and times of one request. Made on any thread, then one engine's own."""

    __slots__ = (
        "_end_ids",
        "_generator",
        "_next_index",
        "_plain",
        "_prompt_len",
        "_tokens",
        "_uniforms",
        "arrival_time_ns",
        "cum_log_prob",
        "deadline_ns",
        "draft_token_ids",
        "emit",
        "first_scheduled_time_ns",
        "first_token_time_ns",
        "guide",
        "last_token_time_ns",
        "num_output",
        "request",
    )

    def __init__(self, request: Request, emit: Emit) -> None:
        self.request = request
        self.emit = emit
        self._prompt_len = len(request.prompt_token_ids)
        self._tokens = np.empty(self._prompt_len + request.max_tokens, np.int32)
        self._tokens[: self._prompt_len] = request.prompt_token_ids
        self._end_ids = {request.end_id, *request.more_end_ids} - {None}
        self.deadline_ns = sys.maxsize if request.deadline_ns is None else request.deadline_ns
        # Counter-based and one per request: what is drawn depends on the seed and the number of
        # tokens so far, never on the slot, the load or a preemption.
        self._generator: np.random.Generator | None = None
        if not request.sampling.greedy:
            self._generator = np.random.Generator(np.random.Philox(request.sampling.seed))
        self._uniforms: list[float] = []
        self.guide = None if request.guide is None else request.guide.start()
        self._plain: RowSampling | None = (
            None  # one object for all tokens: made once a step, it shows
        )
        self.draft_token_ids: tuple[int, ...] = ()  # guesses of the tokens after the last one
        self._next_index = 0
        self.num_output = 0
        self.cum_log_prob = 0.0
        self.arrival_time_ns = time.time_ns()
        self.first_scheduled_time_ns = 0
        self.first_token_time_ns = 0
        self.last_token_time_ns = 0

    def step_row(self, row: ScheduledRow) -> StepRow:
        """Return what the runner computes for `row`; the arrays are views."""
        end = row.context_len + row.num_tokens
        token_ids = self._tokens[row.context_len : end]
        if not row.samples:
            next_token = int(self._tokens[end])
            return StepRow(
                row.request_key,
                token_ids,
                row.context_len,
                row.block_table,
                sampling=None,
                next_token_id=next_token,
            )
        if not row.num_drafts:
            return StepRow(
                row.request_key, token_ids, row.context_len, row.block_table, self._sampling(())
            )
        drafts = self.draft_token_ids[: row.num_drafts]
        samplings = [self._sampling(drafts[:count]) for count in range(len(drafts) + 1)]
        return StepRow(
            row.request_key,
            token_ids,
            row.context_len,
            row.block_table,
            sampling=samplings[0],
            draft_token_ids=drafts,
            draft_sampling=tuple(samplings[1:]),
        )

    @property
    def num_left(self) -> int:
        """How many tokens the request may still get."""
        return self.request.max_tokens - self.num_output

    @property
    def may_follow_unseen(self) -> bool:
        """Whether a token can be drawn before the one before it is known here."""
        params = self.request.sampling
        return self.takes_drafts and not (params.penalized or params.logit_bias)

    def following_row(self, row: ScheduledRow) -> StepRow:
        """Return the row after `row`, of the token that `row` draws; 0 stands for it."""
        return StepRow(
            row.request_key,
            _UNSEEN,
            row.context_len + row.num_tokens,
            row.block_table,
            self._sampling(_ONE_AHEAD),
        )

    def _sampling(self, drafts: tuple[int, ...]) -> RowSampling:
        """How to draw the token after the known ones and `drafts`."""
        if self._plain is not None:
            return self._plain
        params = self.request.sampling
        prompt = output = _NO_TOKENS
        if params.penalized:
            known = self._prompt_len + self.num_output
            prompt, output = (
                self._tokens[: self._prompt_len],
                self._tokens[self._prompt_len : known],
            )
            if drafts:
                output = np.concatenate([output, np.array(drafts, np.int32)])
        ban = self.num_output + len(drafts) < params.min_tokens
        sampling = RowSampling(
            params=params,
            uniform=self._uniform(len(drafts)),
            banned_id=self.request.end_id if ban else None,
            prompt_token_ids=prompt,
            output_token_ids=output,
            more_banned_ids=self.request.more_end_ids if ban else (),
            allowed=None if self.guide is None else self.guide.allowed(),
        )
        if sampling.plain and not drafts and self.guide is None:  # and so from here on
            self._plain = sampling
        return sampling

    def _uniform(self, ahead: int) -> float:
        """The number for the output token `ahead` of the next one: each token has its own.

        So a step that is run again, or draws more than it keeps, changes nothing.
        """
        if self._generator is None:
            return 0.0
        while len(self._uniforms) <= ahead:
            self._uniforms.append(self._generator.random())
        return self._uniforms[ahead]

    @property
    def takes_drafts(self) -> bool:
        """Whether more than one token may be drawn in a step.

        A guide says what may come next only after the token before it, and the likeliest tokens
        are reported for a row's first place alone.
        """
        return self.guide is None and not self.request.sampling.top_log_probs

    def ends_with(self, token_id: int) -> bool:
        """Whether `token_id` is an end id of this request."""
        return token_id in self._end_ids

    def append(self, token_id: int, log_prob: float, now_ns: int) -> bool:
        """Add an output token drawn at `now_ns` (time.time_ns()); return whether it is the last."""
        del self._uniforms[:1]
        self._tokens[self._prompt_len + self.num_output] = token_id
        self.num_output += 1
        if self.request.sampling.return_log_probs:
            self.cum_log_prob += log_prob
        self.first_token_time_ns = self.first_token_time_ns or now_ns
        self.last_token_time_ns = now_ns
        return self.num_output == self.request.max_tokens

    def output(
        self,
        progress: Progress,
        token_ids: tuple[int, ...],
        log_probs: tuple[float, ...],
        finish_reason: FinishReason | None = None,
        error: DeepseekTritonError | None = None,
        top_log_probs: tuple[TopLogProbs, ...] = (),
    ) -> TokenOutput:
        """Return this request's next output, numbered."""
        index = self._next_index
        self._next_index += 1
        return TokenOutput(
            request_key=self.request.request_key,
            index=index,
            token_ids=token_ids,
            log_probs=log_probs,
            cum_log_prob=self.cum_log_prob,
            num_input_tokens=self._prompt_len,
            num_output_tokens=self.num_output,
            finish_reason=finish_reason,
            error=error,
            stats=RequestStats(
                arrival_time_ns=self.arrival_time_ns,
                first_scheduled_time_ns=self.first_scheduled_time_ns,
                first_token_time_ns=self.first_token_time_ns,
                last_token_time_ns=self.last_token_time_ns,
                kv_blocks_allocated=progress.blocks_allocated,
                preemptions=progress.preemptions,
            ),
            top_log_probs=top_log_probs,
        )
