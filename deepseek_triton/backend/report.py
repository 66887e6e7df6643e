"""The output tensors of the contract that report on a request, beside its text or ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from deepseek_triton.backend.pb import text_tensor
from deepseek_triton.request import FinishReason, RequestStats

_RUNNING = text_tensor("")
_REASONS = {reason: text_tensor(reason.value) for reason in FinishReason}


def _zeros(dtype: DTypeLike, *dims: int) -> NDArray[Any]:
    return np.zeros((1, *(dims or (1,))), dtype)


# One prompt, one sequence; and what this version does not compute.
_CONSTANTS = {
    "batch_index": _zeros(np.int32),
    "sequence_index": _zeros(np.int32),
    "context_logits": _zeros(np.float32, 1, 1),
    "generation_logits": _zeros(np.float32, 1, 1, 1),
    "acceptance_rate": _zeros(np.float32),
    "total_accepted_draft_tokens": _zeros(np.int32),
    "total_draft_tokens": _zeros(np.int32),
}


@dataclass(frozen=True)
class Progress:
    """What is known about a request at one of its responses."""

    num_input_tokens: int
    num_output_tokens: int  # so far
    counts: bool  # asked for with every response
    log_probs: Sequence[float] | None  # of this response's tokens; None unless asked for
    cum_log_prob: float
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None  # None unless asked for


def report_tensors(progress: Progress) -> dict[str, NDArray[Any]]:
    """Return the report of one response, each tensor with batch dimension 1.

    The last response holds every tensor, zeros where nothing was asked for. Those before it hold
    finish_reason, and the log probs and token counts that were asked for: each tensor costs time
    with every token.
    """
    last = progress.finish_reason is not None
    tensors: dict[str, NDArray[Any]] = {
        "finish_reason": _RUNNING
        if progress.finish_reason is None
        else _REASONS[progress.finish_reason]
    }
    if last or progress.log_probs is not None:
        log_probs = progress.log_probs if progress.log_probs is not None else (0.0,)
        tensors["output_log_probs"] = np.array([[log_probs]], np.float32)
        tensors["cum_log_probs"] = np.array([[progress.cum_log_prob]], np.float32)
    if last or progress.counts:
        tensors["num_input_tokens"] = _int32(progress.num_input_tokens)
        tensors["num_output_tokens"] = _int32(progress.num_output_tokens)
    if last:
        tensors |= _CONSTANTS
        tensors |= _stats_tensors(progress.stats or RequestStats())
    return tensors


def _stats_tensors(stats: RequestStats) -> dict[str, NDArray[Any]]:
    times = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns")
    return {
        "kv_cache_alloc_new_blocks": _int32(stats.kv_blocks_allocated),
        "kv_cache_reused_blocks": _int32(stats.kv_blocks_reused),
        "kv_cache_alloc_total_blocks": _int32(stats.kv_blocks_allocated + stats.kv_blocks_reused),
        **{
            name: np.array([[getattr(stats, name)]], np.int64)
            for name in (*times, "last_token_time_ns")
        },
    }


def _int32(value: int) -> NDArray[np.int32]:
    return np.array([[value]], np.int32)
