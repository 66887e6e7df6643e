"""All choices of one request: run at the same time, their pieces in the order they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from deepseek_triton.gateway.errors import timed_out
from deepseek_triton.gateway.pool import ServerPool
from deepseek_triton.gateway.record import RequestRecord
from deepseek_triton.gateway.served_model import ServedModel
from deepseek_triton.gateway.triton import Call, Piece

_CANCELLED, _ERROR = "cancelled", "error"


class Generation:
    """Counts what it passes on, so that usage is exact when the last piece has come."""

    def __init__(
        self,
        pool: ServerPool,
        calls: Sequence[Call],
        record: RequestRecord,
        *,
        model: ServedModel,
        prompt_param: str,
        choices_per_prompt: int = 1,
    ) -> None:
        self._pool = pool
        self._calls = calls
        self._record = record
        self._model = model
        self._prompt_param = prompt_param
        self._choices_per_prompt = choices_per_prompt

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yield (index of the choice, piece). Raises ApiError; closing it cancels all choices."""
        if len(self._calls) == 1:
            async with contextlib.aclosing(self._one(0)) as only:
                async for piece in only:
                    yield 0, piece
            return
        queue: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._fill(i, queue)) for i in range(len(self._calls))]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object of what has been passed on."""
        record = self._record
        return {
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "total_tokens": record.prompt_tokens + record.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": record.cached_tokens},
        }

    async def _fill(
        self, index: int, queue: asyncio.Queue[tuple[int, Piece] | Exception | None]
    ) -> None:
        try:
            async with contextlib.aclosing(self._one(index)) as pieces:
                async for piece in pieces:
                    queue.put_nowait((index, piece))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    async def _one(self, index: int) -> AsyncGenerator[Piece, None]:
        call, texts = self._calls[index], list[str]()
        try:
            async with contextlib.aclosing(self._pool.stream(call, self._prompt_param)) as pieces:
                async for piece in pieces:
                    if piece.finish_reason == _ERROR:
                        continue  # the error itself comes next
                    self._record.note_first_token()
                    texts.append(piece.text)
                    if piece.finish_reason:
                        self._count(index, piece)
                        texts.clear()
                    if piece.finish_reason == _CANCELLED:
                        raise timed_out(call.timeout_s)
                    yield piece
        finally:  # no count came of an answer that was broken off
            self._record.completion_tokens += self._model.count("".join(texts))

    def _count(self, index: int, piece: Piece) -> None:
        record = self._record
        if index % self._choices_per_prompt == 0:
            num_prompt = piece.integer("num_input_tokens")
            cached = piece.integer("kv_cache_reused_blocks") * self._model.block_size
            record.prompt_tokens += num_prompt
            record.cached_tokens += min(cached, num_prompt)
        record.completion_tokens += piece.integer("num_output_tokens")
