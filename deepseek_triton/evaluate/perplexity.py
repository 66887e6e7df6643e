"""Perplexity of given tokens, and how often two engines name the same next token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from deepseek_triton.errors import ConfigError
from deepseek_triton.request import RequestKey, SamplingParams
from deepseek_triton.runner.base import ModelRunner, RowSampling, ScoringRunner, StepRow

_CHUNK = 256  # tokens of one call: keys after the chunk are not even masked
_MAX_LOGITS = 1 << 25  # of one call: 128 MiB in float32
_NONE = np.zeros(0, np.int32)
_GREEDY = RowSampling(SamplingParams(), 0.0, None, _NONE, _NONE)


@dataclass(frozen=True)
class Scores:
    """What an engine made of all windows; every token of one but the first is predicted."""

    log_probs: NDArray[np.float32]  # [windows, length] natural logarithms
    best_ids: NDArray[np.int32]  # [windows, length]

    @property
    def loss(self) -> float:
        """Mean of −log p over the tokens, in nats: the logarithm of the perplexity."""
        return -float(self.log_probs.mean(dtype=np.float64))

    @property
    def standard_error(self) -> float:
        """Of `loss`, from the spread of the windows' means; 0 for a single window."""
        means = self.log_probs.mean(axis=1, dtype=np.float64)
        return float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else 0.0


def cut_windows(tokens: NDArray[np.int32], length: int, count: int) -> NDArray[np.int32]:
    """Return [n ≤ count, length + 1]: windows spread evenly over `tokens` [N].

    Neighbours share one token, which one of them predicts and the other begins with. Raises
    ConfigError for a text shorter than one window.
    """
    for name, value in (("windows", count), ("window-length", length)):
        if value < 1:
            raise ConfigError(f"{name}: {value}; at least 1 is needed")
    available = (len(tokens) - 1) // length
    if available < 1:
        raise ConfigError(
            f"TEXT: it has {len(tokens)} tokens, one window takes {length + 1}: "
            "give a longer text or a smaller window"
        )
    chosen = np.linspace(0, available - 1, min(count, available)).round().astype(int)
    return np.stack([tokens[i * length : (i + 1) * length + 1] for i in chosen])


def blocks_needed(runner: ModelRunner, length: int) -> int:
    """Return the KV blocks of `runner` that a context of `length` tokens takes."""
    return runner.kv_cache_spec.blocks_for(length)


def score_windows(runner: ScoringRunner, windows: NDArray[np.int32], name: str = "") -> Scores:
    """Score `windows` [n, length + 1], one at a time; `name` labels the progress bar.

    Mutates the KV pools of `runner`. Raises ConfigError if a window does not fit into them or a
    score is not finite.
    """
    log_probs, best_ids = [], []
    for window in tqdm(windows, desc=f"score {name}".rstrip(), unit="window", disable=None):
        parts = [runner.score((row,))[0] for row in _chunks(runner, window)]
        log_probs.append(np.concatenate([part.log_probs for part in parts]))
        best_ids.append(np.concatenate([part.best_ids for part in parts]))
    scores = Scores(np.stack(log_probs), np.stack(best_ids))
    if not np.isfinite(scores.log_probs).all():
        raise ConfigError(
            f"{name or 'the engine'} gave logits that are not finite, most likely an overflow; "
            "build it with PRECISION=fp32, or bf16 where the target has it (if it is: a weight of "
            "the checkpoint is not finite)"
        )
    return scores


def agreement(scores: Scores, reference: Scores) -> float:
    """Return the share of tokens after which both engines name the same likeliest one."""
    return float((scores.best_ids == reference.best_ids).mean())


def continue_greedily(
    runner: ModelRunner, prompts: NDArray[np.int32], count: int
) -> NDArray[np.int32]:
    """Return [n, count]: the likeliest tokens after `prompts` [n, length], end tokens included.

    One prompt at a time; mutates the KV pools of `runner`.
    """
    outputs = []
    for prompt in tqdm(prompts, desc="continue", unit="prompt", disable=None):
        table = _block_table(runner, len(prompt) + count)
        ids, context_len, output = prompt, 0, []
        for _ in range(count):
            row = StepRow(RequestKey("evaluate"), ids, context_len, table, _GREEDY)
            context_len += len(ids)
            ids = runner.run((row,)).token_ids
            output.append(int(ids[0]))
        outputs.append(output)
    return np.array(outputs, np.int32)


def _chunks(runner: ModelRunner, window: NDArray[np.int32]) -> Iterator[StepRow]:
    """Cut a window so that the logits of a chunk fit in memory."""
    length = len(window) - 1
    table = _block_table(runner, length)
    step = max(1, min(_CHUNK, _MAX_LOGITS // runner.vocab_size))
    for start in range(0, length, step):
        end = min(start + step, length)
        yield StepRow(
            RequestKey("evaluate"),
            window[start:end],
            start,
            table[: runner.kv_cache_spec.blocks_for(end)],
            None,
            next_token_id=int(window[end]),
        )


def _block_table(runner: ModelRunner, length: int) -> NDArray[np.int32]:
    needed = blocks_needed(runner, length)
    if needed > runner.num_blocks:
        raise ConfigError(f"{length} tokens take {needed} KV blocks of {runner.num_blocks}")
    return np.arange(needed, dtype=np.int32)
