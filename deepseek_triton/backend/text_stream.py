"""From one request's output ids to its text: decoding, stop strings, finish reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepseek_triton.backend.packet import TextOptions
from deepseek_triton.request import FinishReason, TopLogProbs
from deepseek_triton.text.detokenizer import IncrementalDetokenizer
from deepseek_triton.text.stop_strings import StopStringMatcher
from deepseek_triton.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextPiece:
    """What was added since the last piece."""

    text: str
    log_probs: tuple[float, ...]
    token_ids: tuple[int, ...] = ()
    top_log_probs: tuple[TopLogProbs, ...] = ()


class TextStream:
    """The text of one request as it grows; what it does depends on the ids, not on their grouping.

    The text ends before the first stop string, or with the engine's finish reason; text that may
    still become a stop string, and bytes of an unfinished character, wait until then. Tokens after
    the one that completes a stop string do not count.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopStringMatcher(options.stop) if any(options.stop) else None
        self._text = [tokenizer.decode(options.echo_ids)] if options.echo_ids else []
        self._log_probs: list[float] = []
        self._token_ids: list[int] = []
        self._top_log_probs: list[TopLogProbs] = []
        self.num_output_tokens = 0
        self.cum_log_prob = 0.0
        self.finish_reason: FinishReason | None = None

    def push(
        self,
        token_ids: Sequence[int],
        log_probs: Sequence[float] = (),
        finish_reason: FinishReason | None = None,
        top_log_probs: Sequence[TopLogProbs] = (),
    ) -> None:
        """Add tokens, with log probs for each or none; `finish_reason` if they are the last."""
        if self._matcher is None:
            self._count(token_ids, log_probs, top_log_probs)
            self._text.append(self._detokenizer.push(token_ids))
        else:
            for i, token_id in enumerate(token_ids):
                if self.finish_reason is not None:
                    break
                one = slice(i, i + 1)
                self._count((token_id,), log_probs[one], top_log_probs[one])
                self._add(self._detokenizer.push((token_id,)))
        if finish_reason is not None and self.finish_reason is None:
            self._end(finish_reason)

    def take(self) -> TextPiece:
        """Return what was added since the last call."""
        piece = TextPiece(
            "".join(self._text),
            tuple(self._log_probs),
            tuple(self._token_ids),
            tuple(self._top_log_probs),
        )
        self._text, self._log_probs, self._token_ids, self._top_log_probs = [], [], [], []
        return piece

    def _count(
        self,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        top_log_probs: Sequence[TopLogProbs],
    ) -> None:
        self.num_output_tokens += len(token_ids)
        self._token_ids.extend(token_ids)
        self._top_log_probs.extend(top_log_probs)
        for log_prob in log_probs:
            self.cum_log_prob += log_prob
        self._log_probs.extend(log_probs)

    def _add(self, text: str) -> None:
        if self._matcher is None:
            self._text.append(text)
            return
        safe, stop = self._matcher.push(text)
        self._text.append(safe)
        if stop is not None:
            self.finish_reason = FinishReason.STOP

    def _end(self, finish_reason: FinishReason) -> None:
        self._add(self._detokenizer.flush())
        if self.finish_reason is not None:  # the last bytes completed a stop string
            return
        if self._matcher is not None:
            self._text.append(self._matcher.flush())
        self.finish_reason = finish_reason
