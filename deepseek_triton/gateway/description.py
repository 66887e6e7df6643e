"""The OpenAPI description: what clients get, and with which statuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict


class Open(BaseModel):
    """A JSON object that may have further keys."""

    model_config = ConfigDict(extra="allow")


class ErrorDetail(Open):
    """What went wrong, in OpenAI's form."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Open):
    """The body of every answer but 200."""

    error: ErrorDetail


class PromptDetails(Open):
    """More about the prompt."""

    cached_tokens: int


class Usage(Open):
    """Tokens of the request, all of its choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Function(Open):
    """What is called, with arguments as the model wrote them."""

    name: str
    arguments: str


class Call(Open):
    """One call of a tool."""

    id: str
    type: Literal["function"]
    function: Function


class Answer(Open):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    refusal: None


class ChatChoice(Open):
    """One of n answers."""

    index: int
    message: Answer
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Open):
    """The answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(Open):
    """One of the continuations."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(Open):
    """The continuations of one text or several."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class Model(Open):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Open):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Open):
    """A text's token ids."""

    tokens: list[int]
    count: int
    max_model_len: int


class Text(Open):
    """The text of token ids."""

    prompt: str


class Status(Open):
    """How the gateway is."""

    status: str


Responses = dict[int | str, dict[str, Any]]

_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}
_METRICS = {"text/plain": {"schema": {"type": "string"}}}
ERRORS: Responses = {
    "4XX": {"model": Error, "description": "The request cannot be answered as it is."},
    "5XX": {"model": Error, "description": "The servers or the gateway failed."},
}
RESPONSES: dict[str, Responses] = {
    "/v1/chat/completions": {200: {"model": ChatCompletion, "content": _STREAM}},
    "/v1/completions": {200: {"model": TextCompletion, "content": _STREAM}},
    "/v1/models": {200: {"model": ModelList}},
    "/v1/models/{model:path}": {200: {"model": Model}},
    "/tokenize": {200: {"model": Tokens}},
    "/detokenize": {200: {"model": Text}},
    "/health": {200: {"model": Status}},
    "/ready": {200: {"model": Status}, 503: {"model": Status}},
    "/metrics": {200: {"description": "Prometheus' text format.", "content": _METRICS}},
}


def describe(app: FastAPI, *, with_keys: bool) -> Callable[[], dict[str, Any]]:
    """Return a function that makes the description, once."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _adjusted(
                get_openapi(
                    title=app.title, version=app.version, summary=app.summary, routes=app.routes
                ),
                with_keys=with_keys,
            )
        return app.openapi_schema

    return openapi


def _adjusted(schema: dict[str, Any], *, with_keys: bool) -> dict[str, Any]:
    """Drop FastAPI's own 422, which is never sent, and say where a key is needed."""
    components = schema.setdefault("components", {})
    for name in ("HTTPValidationError", "ValidationError"):
        components.get("schemas", {}).pop(name, None)
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if path == "/v1/embeddings":
                operation["responses"].pop("200", None)
            if with_keys and not path.startswith(("/health", "/ready", "/metrics")):
                operation["security"] = [{"key": []}]
    if with_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return schema
