"""POST /v1/chat/completions: pieces of text → messages, reasoning and tool calls."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from deepseek_triton.gateway.errors import ApiError
from deepseek_triton.gateway.generation import Generation
from deepseek_triton.gateway.log_probs import chat_log_probs
from deepseek_triton.gateway.record import RequestRecord
from deepseek_triton.gateway.schema import ChatRequest
from deepseek_triton.gateway.served_model import ServedModel
from deepseek_triton.gateway.streaming import DONE, event
from deepseek_triton.gateway.triton import Piece
from deepseek_triton.text.reasoning import ReasoningSplitter, begins_inside
from deepseek_triton.text.tool_calls import ToolCallDelta, ToolCallParser


@dataclass
class Delta:
    """What one piece adds to a message."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class ChatChoice:
    """One choice while it is made."""

    def __init__(self, request: ChatRequest, model: ServedModel, prompt: str) -> None:
        reasons = model.template is not None and model.template.reasons
        self._splitter = ReasoningSplitter(inside=begins_inside(prompt)) if reasons else None
        wants_tools = bool(request.tools) and request.tool_choice != "none"
        self._parser = ToolCallParser() if wants_tools else None
        self._call_ids: dict[int, str] = {}
        self.message = Delta()
        self.log_probs: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.begun = False

    def push(self, piece: Piece) -> Delta:
        """Return what `piece` adds."""
        delta = self._split(piece.text, final=bool(piece.finish_reason))
        if piece.finish_reason:
            called = self._parser is not None and self._parser.num_calls > 0
            tool_calls = called and piece.finish_reason == "stop"
            self.finish_reason = "tool_calls" if tool_calls else piece.finish_reason
        return delta

    def call_deltas(self, calls: list[ToolCallDelta]) -> list[dict[str, Any]]:
        """Return deltas of calls as a stream's chunk holds them."""
        found = []
        for call in calls:
            function: dict[str, str] = {"arguments": call.arguments}
            delta: dict[str, Any] = {"index": call.index, "function": function}
            if call.name is not None:
                self._call_ids[call.index] = f"call_{uuid.uuid4().hex[:24]}"
                delta |= {"id": self._call_ids[call.index], "type": "function"}
                function["name"] = call.name
            found.append(delta)
        return found

    def whole_message(self) -> dict[str, Any]:
        """Return the message that all deltas make."""
        total = self.message
        message: dict[str, Any] = {"role": "assistant", "content": total.content, "refusal": None}
        if total.reasoning:
            message["reasoning_content"] = total.reasoning
        calls: dict[int, dict[str, Any]] = {}
        for delta in self.call_deltas(total.calls):
            call = calls.setdefault(delta.pop("index"), delta)
            if call is not delta:
                call["function"]["arguments"] += delta["function"]["arguments"]
        if calls:
            message["tool_calls"] = list(calls.values())
            message["content"] = total.content or None
        return message

    def _split(self, text: str, *, final: bool) -> Delta:
        reasoning, content = ("", text) if self._splitter is None else self._splitter.push(text)
        if final and self._splitter is not None:
            more_reasoning, more_content = self._splitter.flush()
            reasoning, content = reasoning + more_reasoning, content + more_content
        if self._parser is None:
            return Delta(reasoning, content)
        content, calls = self._parser.push(content)
        if final:
            more_content, more_calls = self._parser.flush()
            content, calls = content + more_content, calls + more_calls
        return Delta(reasoning, content, calls)


class ChatAnswer:
    """Answers one request, streamed or whole."""

    def __init__(
        self,
        request: ChatRequest,
        model: ServedModel,
        prompt: str,
        generation: Generation,
        record: RequestRecord,
    ) -> None:
        self._request = request
        self._model = model
        self._generation = generation
        self._record = record
        self._choices = [ChatChoice(request, model, prompt) for _ in range(request.n or 1)]
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if request.stream else "chat.completion",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }

    async def whole(self) -> dict[str, Any]:
        """Return the response's JSON object. Raises ApiError."""
        async for index, piece in self._generation.pieces():
            choice = self._choices[index]
            delta, total = choice.push(piece), choice.message
            total.reasoning += delta.reasoning
            total.content += delta.content
            total.calls += delta.calls
            if self._request.logprobs:
                choice.log_probs += chat_log_probs(piece, self._model)
        self._record.finish_reasons = [str(choice.finish_reason) for choice in self._choices]
        return {
            **self._head,
            "choices": [
                {
                    "index": index,
                    "message": choice.whole_message(),
                    "logprobs": self._log_probs(choice.log_probs),
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in enumerate(self._choices)
            ],
            "usage": self._generation.usage(),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the stream's events. An error before the first one is raised as ApiError.

        A later one is an event itself, and then no [DONE] comes.
        """
        begun = False
        options = self._request.stream_options
        with_usage = options is not None and bool(options.include_usage)
        try:
            async with contextlib.aclosing(self._generation.pieces()) as pieces:
                async for index, piece in pieces:
                    chunk = self._chunk(index, piece)
                    if chunk is not None:
                        begun = True
                        yield event({**chunk, "usage": None} if with_usage else chunk)
        except ApiError as error:
            if not begun:
                raise
            self._record.error = error.code or error.kind
            yield event(error.body())
            return
        self._record.finish_reasons = [str(choice.finish_reason) for choice in self._choices]
        if with_usage:
            yield event({**self._head, "choices": [], "usage": self._generation.usage()})
        yield DONE

    def _chunk(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """Return the chunk for one piece; None if it says nothing."""
        choice = self._choices[index]
        delta = choice.push(piece)
        log_probs = chat_log_probs(piece, self._model) if self._request.logprobs else []
        if not (delta or log_probs or choice.finish_reason):
            return None
        content: dict[str, Any] = {}
        if not choice.begun:
            choice.begun = True
            content = {"role": "assistant", "content": ""}
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        if delta.content:
            content["content"] = delta.content
        if delta.calls:
            content["tool_calls"] = choice.call_deltas(delta.calls)
        return {
            **self._head,
            "choices": [
                {
                    "index": index,
                    "delta": content,
                    "logprobs": self._log_probs(log_probs),
                    "finish_reason": choice.finish_reason,
                }
            ],
        }

    def _log_probs(self, content: list[dict[str, Any]]) -> dict[str, Any] | None:
        return {"content": content, "refusal": None} if self._request.logprobs else None
