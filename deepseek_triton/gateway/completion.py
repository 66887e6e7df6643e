"""POST /v1/completions: text after a text."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepseek_triton.gateway.errors import ApiError
from deepseek_triton.gateway.generation import Generation
from deepseek_triton.gateway.log_probs import CompletionLogProbs
from deepseek_triton.gateway.record import RequestRecord
from deepseek_triton.gateway.schema import CompletionRequest
from deepseek_triton.gateway.served_model import ServedModel
from deepseek_triton.gateway.streaming import DONE, event
from deepseek_triton.gateway.triton import Piece


@dataclass
class _Choice:
    echo: str  # the prompt, if the text begins with it and it was not sent yet
    log_probs: CompletionLogProbs
    text: str = ""
    collected: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None


class CompletionAnswer:
    """Answers one request, streamed or whole. Choices are numbered prompt by prompt."""

    def __init__(
        self,
        request: CompletionRequest,
        model: ServedModel,
        prompts: Sequence[str],
        generation: Generation,
        record: RequestRecord,
    ) -> None:
        self._request = request
        self._generation = generation
        self._record = record
        self._choices = [
            _Choice(prompt if request.echo else "", CompletionLogProbs(model, len(prompt)))
            for prompt in prompts
            for _ in range(request.n or 1)
        ]
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }

    async def whole(self) -> dict[str, Any]:
        """Return the response's JSON object. Raises ApiError."""
        async for index, piece in self._generation.pieces():
            choice = self._choices[index]
            text, log_probs = self._push(choice, piece)
            choice.text += text
            for key, values in (log_probs or {}).items():
                choice.collected.setdefault(key, []).extend(values)
        self._note_reasons()
        return {
            **self._head,
            "choices": [
                {
                    "index": index,
                    "text": choice.text,
                    "logprobs": choice.collected or None,
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in enumerate(self._choices)
            ],
            "usage": self._generation.usage(),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the stream's events; as ChatAnswer.events."""
        begun = False
        options = self._request.stream_options
        with_usage = options is not None and bool(options.include_usage)
        try:
            async with contextlib.aclosing(self._generation.pieces()) as pieces:
                async for index, piece in pieces:
                    choice = self._choices[index]
                    text, log_probs = self._push(choice, piece)
                    if not (text or log_probs or choice.finish_reason):
                        continue
                    begun = True
                    body = {
                        "index": index,
                        "text": text,
                        "logprobs": log_probs,
                        "finish_reason": choice.finish_reason,
                    }
                    chunk = {**self._head, "choices": [body]}
                    yield event({**chunk, "usage": None} if with_usage else chunk)
        except ApiError as error:
            if not begun:
                raise
            self._record.error = error.code or error.kind
            yield event(error.body())
            return
        self._note_reasons()
        if with_usage:
            yield event({**self._head, "choices": [], "usage": self._generation.usage()})
        yield DONE

    def _push(self, choice: _Choice, piece: Piece) -> tuple[str, dict[str, Any] | None]:
        text, choice.echo = choice.echo + piece.text, ""
        choice.finish_reason = piece.finish_reason or None
        wanted = self._request.logprobs is not None
        return text, choice.log_probs.of(piece) if wanted else None

    def _note_reasons(self) -> None:
        self._record.finish_reasons = [str(choice.finish_reason) for choice in self._choices]
