"""Log probs in the forms of OpenAI's two APIs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deepseek_triton.gateway.served_model import ServedModel
from deepseek_triton.gateway.triton import Piece


@dataclass(frozen=True)
class TokenLogProb:
    """A generated token and the likeliest ones in its place, the most likely first."""

    token_id: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


def token_log_probs(piece: Piece) -> Iterator[TokenLogProb]:
    """Yield those of the tokens that `piece` counts; none unless they were asked for."""
    token_ids = piece.arrays.get("output_token_ids")
    log_probs = piece.arrays.get("output_log_probs")
    if token_ids is None or log_probs is None or not token_ids.size:
        return
    num_tokens = len(token_ids)
    top_ids, top_log_probs = piece.arrays.get("top_token_ids"), piece.arrays.get("top_log_probs")
    for index in range(num_tokens):
        top: tuple[tuple[int, float], ...] = ()
        if top_ids is not None and top_log_probs is not None and top_ids.size:
            ids = top_ids.reshape(num_tokens, -1)[index].tolist()
            values = top_log_probs.reshape(num_tokens, -1)[index].tolist()
            top = tuple(zip(ids, values, strict=True))
        yield TokenLogProb(int(token_ids[index]), float(log_probs[index]), top)


def chat_log_probs(piece: Piece, model: ServedModel) -> list[dict[str, Any]]:
    """Return the `content` list of a chat choice's logprobs."""

    def entry(token_id: int, log_prob: float) -> dict[str, Any]:
        token_bytes = model.tokenizer.token_bytes(token_id)
        return {
            "token": model.token_text(token_id),
            "logprob": log_prob,
            "bytes": list(token_bytes),
        }

    return [
        {
            **entry(token.token_id, token.log_prob),
            "top_logprobs": [entry(*alternative) for alternative in token.top],
        }
        for token in token_log_probs(piece)
    ]


class CompletionLogProbs:
    """Builds the logprobs objects of one text completion, which count characters."""

    def __init__(self, model: ServedModel, offset: int) -> None:
        """`offset` characters stand before the first token."""
        self._model = model
        self._offset = offset

    def of(self, piece: Piece) -> dict[str, Any]:
        """Return the object for the tokens of one piece."""
        found: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token in token_log_probs(piece):
            text = self._model.token_text(token.token_id)
            found["tokens"].append(text)
            found["token_logprobs"].append(token.log_prob)
            found["top_logprobs"].append(
                {self._model.token_text(token_id): value for token_id, value in token.top}
            )
            found["text_offset"].append(self._offset)
            self._offset += len(text)
        return found
