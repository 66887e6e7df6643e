"""The application: routes, errors, and what lives as long as it does."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from deepseek_triton.errors import InvalidRequestError
from deepseek_triton.gateway.call import (
    Origin,
    chat_calls,
    chat_prompt,
    check_unicode,
    completion_calls,
)
from deepseek_triton.gateway.chat import ChatAnswer
from deepseek_triton.gateway.completion import CompletionAnswer
from deepseek_triton.gateway.config import GatewayOptions
from deepseek_triton.gateway.description import ERRORS, RESPONSES, describe
from deepseek_triton.gateway.errors import ApiError, bad_request, not_supported, server_error
from deepseek_triton.gateway.gate import Gate
from deepseek_triton.gateway.generation import Generation
from deepseek_triton.gateway.keys import KeyRing
from deepseek_triton.gateway.metrics import GatewayMetrics
from deepseek_triton.gateway.page import add_page
from deepseek_triton.gateway.pool import ServerPool
from deepseek_triton.gateway.record import record_of
from deepseek_triton.gateway.running import RunningRequests
from deepseek_triton.gateway.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from deepseek_triton.gateway.served_model import ServedModel
from deepseek_triton.gateway.streaming import ClientGone, EventStream, unless_client_leaves
from deepseek_triton.gateway.triton import Call, TritonServer
from deepseek_triton.gateway.validation import validation_error

_CLIENT_CLOSED_REQUEST = 499  # for the log alone: nobody reads it


class _Answer(Protocol):
    async def whole(self) -> dict[str, Any]: ...
    def events(self) -> AsyncGenerator[bytes, None]: ...


class Gateway:
    """The handlers of the routes."""

    def __init__(
        self,
        options: GatewayOptions,
        model: ServedModel,
        servers: Sequence[TritonServer] | None = None,
    ) -> None:
        self.metrics = GatewayMetrics()
        self._options = options
        self._model = model
        self._servers = servers
        self._pool: ServerPool | None = None

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Hold the connections for as long as the application runs."""
        servers = self._servers or [TritonServer(url) for url in self._options.servers]
        self._pool = ServerPool(servers)
        await self._pool.start()
        try:
            yield
        finally:
            await self._pool.close()

    @property
    def pool(self) -> ServerPool:
        """The servers; raises ApiError before the application has started."""
        if self._pool is None:
            raise server_error("the gateway has not started")
        return self._pool

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        self._check_model(request, body.model)
        prompt, calls = chat_calls(body, self._model, self._origin(request))
        generation = self._generation(request, calls, "messages", body.n)
        answer = ChatAnswer(body, self._model, prompt, generation, record_of(request.scope))
        return await self._respond(request, answer, bool(body.stream))

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        """Continue one text or several."""
        self._check_model(request, body.model)
        prompts, calls = completion_calls(body, self._model, self._origin(request))
        generation = self._generation(request, calls, "prompt", body.n)
        record = record_of(request.scope)
        answer = CompletionAnswer(body, self._model, prompts, generation, record)
        return await self._respond(request, answer, bool(body.stream))

    async def embed(self) -> Response:
        """Refuse: these models make no embeddings."""
        raise not_supported("model", "DeepSeek's language models make no embeddings")

    async def models(self) -> dict[str, Any]:
        """List the one model."""
        return {"object": "list", "data": [self._describe_model()]}

    async def model(self, request: Request, model: str) -> dict[str, Any]:
        """Describe one model."""
        self._check_model(request, model)
        return self._describe_model()

    async def tokenize(self, request: Request, body: TokenizeRequest) -> dict[str, Any]:
        """Return the token ids that the server would make of a prompt or a conversation."""
        self._check_model(request, body.model or self._model.name)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("prompt", "send either prompt or messages")
        text = body.prompt if body.prompt is not None else chat_prompt(body, self._model)
        check_unicode(text)
        tokens = self._model.tokenizer.encode(text)
        limit = self._model.max_context_len
        return {"tokens": tokens, "count": len(tokens), "max_model_len": limit}

    async def detokenize(self, request: Request, body: DetokenizeRequest) -> dict[str, Any]:
        """Return the text of token ids, special tokens included."""
        self._check_model(request, body.model or self._model.name)
        for index, token_id in enumerate(body.tokens):
            if not self._model.tokenizer.has_id(token_id):
                raise bad_request(f"tokens[{index}]", f"tokens: {token_id} is no token's id")
        return {"prompt": self._model.tokenizer.decode_all(body.tokens)}

    async def health(self) -> dict[str, str]:
        """Say that the gateway itself runs."""
        return {"status": "ok"}

    async def ready(self) -> Response:
        """Say whether a server is ready."""
        ready = self.pool.ready
        content = {"status": "ready" if ready else "no server is ready"}
        return JSONResponse(content, 200 if ready else 503)

    async def show_metrics(self) -> Response:
        """Return the metrics for Prometheus."""
        return PlainTextResponse(
            self.metrics.render(self.pool.servers), media_type="text/plain; version=0.0.4"
        )

    def _origin(self, request: Request) -> Origin:
        return Origin(record_of(request.scope).request_id, self._options.timeout_s)

    def _check_model(self, request: Request, name: str) -> None:
        record_of(request.scope).model = self._model.name
        if name != self._model.name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; there is {self._model.name!r}",
                param="model",
                code="model_not_found",
            )

    def _describe_model(self) -> dict[str, Any]:
        model = self._model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "deepseek-triton",
            "max_model_len": model.max_context_len,
        }

    def _generation(
        self, request: Request, calls: list[Call], prompt_param: str, n: int | None
    ) -> Generation:
        return Generation(
            self.pool,
            calls,
            record_of(request.scope),
            model=self._model,
            prompt_param=prompt_param,
            choices_per_prompt=n or 1,
        )

    async def _respond(self, request: Request, answer: _Answer, stream: bool) -> Response:
        record_of(request.scope).stream = stream
        if stream:
            return EventStream(answer.events())
        return JSONResponse(await unless_client_leaves(request, answer.whole()))


def create_app(
    options: GatewayOptions,
    model: ServedModel,
    servers: Sequence[TritonServer] | None = None,
    *,
    requests: RunningRequests | None = None,
) -> FastAPI:
    """Return the ASGI application. Raises ConfigError for a key file that cannot be read.

    `servers` stand in for those that `options` name. Who is to end `requests` passes them in.
    """
    keys = None if options.key_file is None else KeyRing(options.key_file)
    gateway = Gateway(options, model, servers)
    app = FastAPI(
        title="deepseek-triton gateway",
        summary="OpenAI's API in front of Triton servers.",
        lifespan=gateway.lifespan,
        responses=ERRORS,
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
    )
    _add_routes(app, gateway)
    add_page(app)
    _add_error_handlers(app)
    app.openapi = describe(app, with_keys=keys is not None)  # type: ignore[method-assign]
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(
        Gate,
        options=options,
        metrics=gateway.metrics,
        keys=keys,
        requests=requests if requests is not None else RunningRequests(),
    )
    return app


def _add_routes(app: FastAPI, gateway: Gateway) -> None:
    routes: tuple[tuple[str, str, Any], ...] = (
        ("POST", "/v1/chat/completions", gateway.chat),
        ("POST", "/v1/completions", gateway.complete),
        ("POST", "/v1/embeddings", gateway.embed),
        ("GET", "/v1/models", gateway.models),
        ("GET", "/v1/models/{model:path}", gateway.model),
        ("POST", "/tokenize", gateway.tokenize),
        ("POST", "/detokenize", gateway.detokenize),
        ("GET", "/health", gateway.health),
        ("GET", "/ready", gateway.ready),
        ("GET", "/metrics", gateway.show_metrics),
    )
    for method, path, handler in routes:
        app.add_api_route(
            path, handler, methods=[method], response_model=None, responses=RESPONSES.get(path, {})
        )


def _add_error_handlers(app: FastAPI) -> None:
    def answer(error: ApiError, request: Request) -> JSONResponse:
        record_of(request.scope).error = error.code or error.kind
        return JSONResponse(error.body(), error.status, error.headers)

    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return answer(error, request)

    async def invalid(request: Request, error: InvalidRequestError) -> JSONResponse:
        return answer(bad_request(error.field, str(error)), request)

    async def not_valid(request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(validation_error(error), request)

    async def http(request: Request, error: StarletteHTTPException) -> JSONResponse:
        problem = ApiError(error.status_code, str(error.detail), headers=error.headers)
        return answer(problem, request)

    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    handlers: dict[type[Exception], Any] = {
        ApiError: api_error,
        InvalidRequestError: invalid,
        RequestValidationError: not_valid,
        StarletteHTTPException: http,
        ClientGone: gone,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
