"""What a client asked for, and what the engine answers: data only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.errors import DeepseekTritonError

RequestKey = NewType("RequestKey", str)
"""Unique for each request in the life of a server; made by preprocessing, never by the client."""


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Values are validated where they enter (backend/).

    Order of application: logit_bias, penalties, end-id ban, guide, temperature, top_k, top_p, draw.
    """

    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 = all tokens
    top_p: float = 1.0  # smallest set whose probability reaches it; 0 = the likeliest token alone
    repetition_penalty: float = 1.0  # CTRL (arXiv 1909.05858): over prompt and output tokens
    presence_penalty: float = 0.0  # subtracted once from each token already in the output
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output
    min_tokens: int = 0  # the end id cannot be drawn before this many output tokens
    seed: int | None = None  # None = a fresh one for each request
    return_log_probs: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    top_log_probs: int = 0  # how many of the likeliest tokens are reported in each place

    @property
    def greedy(self) -> bool:
        """Whether no random draw is needed."""
        return self.temperature == 0.0 or self.top_k == 1 or self.top_p == 0.0

    @property
    def penalized(self) -> bool:
        """Whether the sampler needs the tokens seen so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


TopLogProbs = tuple[tuple[int, float], ...]
"""(token id, log prob) of the likeliest tokens in one place, the most likely first."""


class GuideState(Protocol):
    """Where one answer stands in the form that it must follow."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""

    def allowed(self) -> NDArray[np.uint32]:
        """Return the tokens that may come next: bit i % 32 of word i // 32 is token i's."""

    def accept(self, token_id: int) -> str:
        """Take the token that came; return what is wrong, "" if nothing."""


class Guide(Protocol):
    """A form that an answer must follow. Immutable."""

    def start(self) -> GuideState:
        """Return the state of an answer that has no token yet."""


@dataclass(frozen=True)
class Request:
    """One validated prompt. Immutable; what changes while it runs is RequestState (engine/)."""

    request_key: RequestKey
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    end_id: int | None = None  # None = never stop on a token
    deadline_ns: int | None = None  # time.monotonic_ns() at which the engine gives the request up
    more_end_ids: tuple[int, ...] = ()  # further ids that end it: some models have several
    guide: Guide | None = None


@dataclass(frozen=True)
class RequestStats:
    """Times (time.time_ns()) and KV block counts of one request, as the contract reports them."""

    arrival_time_ns: int = 0
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0
    kv_blocks_allocated: int = 0  # blocks newly taken for this request, preemptions included
    kv_blocks_reused: int = 0  # blocks found in the prefix cache
    preemptions: int = 0


@dataclass(frozen=True)
class TokenOutput:
    """What one step added to one request. The last one of a request has `finish_reason`.

    `index` counts this request's outputs from 0 without gaps. `token_ids` is empty only in a last
    output that adds no token (end id, cancelled, error). An end id is neither sent nor counted.
    """

    request_key: RequestKey
    index: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]  # natural log, one per token; empty unless asked for
    cum_log_prob: float  # sum over all of the request's tokens so far; 0 unless asked for
    num_input_tokens: int
    num_output_tokens: int  # so far, this output included
    finish_reason: FinishReason | None = None
    error: DeepseekTritonError | None = None  # set when finish_reason is ERROR
    stats: RequestStats = RequestStats()
    top_log_probs: tuple[TopLogProbs, ...] = ()  # one per token; empty unless asked for
