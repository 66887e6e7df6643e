"""Triton servers that answer from a script, and a gateway in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from deepseek_triton.gateway.app import create_app
from deepseek_triton.gateway.config import GatewayOptions
from deepseek_triton.gateway.served_model import ServedModel
from deepseek_triton.gateway.triton import Call, Piece
from deepseek_triton.text.chat_template import ChatTemplate
from deepseek_triton.text.tokenizer import Tokenizer

FOLDER = Path(str(resources.files("deepseek_triton.checkpoint") / "data"))
THINKING = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content.split('</think>')[-1] if m.content }}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<｜Assistant｜>"
    "{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
MODEL = ServedModel(
    name="m",
    created=1,
    fingerprint="fp_1",
    max_context_len=100,
    block_size=4,
    tokenizer=Tokenizer.load(FOLDER),
    template=ChatTemplate(THINKING, {"bos_token": "<｜begin▁of▁sentence｜>"}),
    temperature=1.0,
    top_p=1.0,
)
PLAIN_MODEL = replace(MODEL, template=None)


def final(text: str, reason: str = "stop", tokens: int = 2, **arrays: Any) -> Piece:
    """The last piece of an answer."""
    counts = {"num_input_tokens": 5, "num_output_tokens": tokens, "kv_cache_reused_blocks": 1}
    every = {name: np.array([value]) for name, value in counts.items()} | arrays
    return Piece(text, reason, every)


@dataclass(eq=False)
class FakeServer:
    """Gives the pieces of `script`, raises what is an exception in it, waits at None."""

    script: Sequence[Piece | Exception | None] = (Piece("Hel"), final("lo"))
    url: str = "fake:1"
    ready: bool = True
    in_flight: int = 0
    calls: list[Call] = field(default_factory=list)
    cancelled: int = 0

    async def probe(self) -> bool:
        return self.ready

    async def close(self) -> None:
        pass

    async def stream(self, call: Call) -> AsyncGenerator[Piece, None]:
        self.calls.append(call)
        self.in_flight += 1
        ended = False
        try:
            for item in self.script:
                if item is None:
                    await asyncio.sleep(3600)
                elif isinstance(item, Exception):
                    ended = True
                    raise item
                else:
                    yield item
            ended = True
        finally:
            self.in_flight -= 1
            self.cancelled += not ended


@contextlib.asynccontextmanager
async def client(
    *servers: FakeServer, model: ServedModel = MODEL, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of a gateway in this process."""
    urls = tuple(server.url for server in servers)
    app = create_app(GatewayOptions(FOLDER, servers=urls, **options), model, list(servers))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app, raise_app_exceptions=False),
            base_url="http://gateway",
        ) as http,
    ):
        yield http


def post(
    path: str, body: Any, *servers: FakeServer, headers: dict[str, str] | None = None, **more: Any
) -> httpx.Response:
    """Send one request to a fresh gateway."""

    async def send() -> httpx.Response:
        async with client(*(servers or (FakeServer(),)), **more) as http:
            if isinstance(body, bytes):
                return await http.post(path, content=body, headers=headers)
            return await http.post(path, json=body, headers=headers)

    return asyncio.run(send())


def chat(*servers: FakeServer, model: ServedModel = MODEL, **fields: Any) -> httpx.Response:
    """Send one conversation."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return post("/v1/chat/completions", body, *servers, model=model)


def complete(*servers: FakeServer, **fields: Any) -> httpx.Response:
    """Send one prompt."""
    return post("/v1/completions", {"model": "m", "prompt": "Hi", **fields}, *servers)


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream, the end as "[DONE]"."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
