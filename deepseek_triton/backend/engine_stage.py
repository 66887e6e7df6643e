"""The model `tensorrt_llm`: token ids in, token ids out, and Triton is never blocked."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from deepseek_triton.backend.engine_process import start_engine
from deepseek_triton.backend.engine_request import ReplyOptions, read_request
from deepseek_triton.backend.extras import read_extras
from deepseek_triton.backend.flow import Flow
from deepseek_triton.backend.inputs import Inputs
from deepseek_triton.backend.metrics_reporter import MetricsReporter
from deepseek_triton.backend.opening import EngineLimits
from deepseek_triton.backend.outbox import Outbox, Reply
from deepseek_triton.backend.pb import (
    InferRequest,
    Pb,
    ResponseSender,
    describe,
    model_parameters,
    request_parameter,
    request_parameter_int,
)
from deepseek_triton.backend.replies import DirectReply, EnsembleReply
from deepseek_triton.config import EngineConfig
from deepseek_triton.engine.engine import Engine
from deepseek_triton.errors import DeepseekTritonError, InvalidRequestError
from deepseek_triton.log import configure_logging, request_logger
from deepseek_triton.request import FinishReason, Request, RequestKey, TokenOutput
from deepseek_triton.wire import ENGINE

_logger = logging.getLogger(__name__)

StartEngine = Callable[[EngineConfig, Callable[[], object]], tuple[Engine, EngineLimits]]

_LEAVE_S = 1.0  # after the engine died: for the errors that tell the clients so


class EngineStage:
    """What Triton calls. execute() validates and submits; responses come from the outbox's thread.

    A request that carries a request_key is a step of the ensemble; any other is a direct call.
    """

    def __init__(
        self,
        pb: Pb | None = None,
        start_engine: StartEngine = start_engine,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._pb = pb or Pb()
        self._start_engine = start_engine
        self._exit_process = exit_process
        self._client_ids: dict[RequestKey, str] = {}  # of direct calls that sent an id

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the engine; an error fails the load of the model with its message."""
        self._config = EngineConfig.from_parameters(model_parameters(args))
        configure_logging(self._config.log_level)
        self._engine, self._limits = self._start_engine(self._config, self._leave)
        self._flow = Flow()
        self._outbox = Outbox(self._engine.abort, self._flow)
        self._metrics = MetricsReporter(self._pb, self._engine.stats)

    def execute(self, requests: Sequence[InferRequest]) -> None:
        """Take each request by itself; a bad one is answered with an error at once."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._take(request, sender)
            except Exception as error:
                if isinstance(error, DeepseekTritonError):
                    _logger.info("request %r refused: %s", request.request_id(), error)
                else:
                    _logger.exception("request %r failed", request.request_id())
                self._metrics.count_refused()
                self._pb.fail(sender, *describe(error))

    def finalize(self) -> None:
        """End every request as cancelled, send that, and free the model."""
        self._engine.close()
        self._outbox.close()
        self._metrics.close()

    def _take(self, request: InferRequest, sender: ResponseSender) -> None:
        arrays = self._pb.inputs(request)
        inputs = Inputs(ENGINE, arrays, for_ensemble="request_key" in arrays)
        sent_key = next(iter(inputs.texts("request_key")), "")
        if inputs.flag("stop"):
            stopped = request_parameter(request, "finish_reason") == FinishReason.STOP.value
            self._stop(
                sent_key,
                request.request_id(),
                FinishReason.STOP if stopped else FinishReason.CANCELLED,
            )
            self._pb.finish(sender)
            return
        key = RequestKey(sent_key or uuid.uuid4().hex)
        now_ns = time.monotonic_ns()
        deadline_ns = self._config.deadline.deadline_ns(
            request_parameter_int(request, "deadline_ms"), now_ns
        )
        extras = read_extras(request, self._limits.vocab_size)
        parsed, options = read_request(inputs, self._limits, key, deadline_ns, extras)
        reply: Reply
        if sent_key:
            reply = EnsembleReply(self._pb, sender, parsed, options, self._flow)
        else:
            reply = self._direct_reply(request, sender, parsed, options)
        self._submit(parsed, reply, inputs)
        request_logger(_logger, key).debug(
            "accepted: request id %r, %d prompt tokens",
            request.request_id(),
            len(parsed.prompt_token_ids),
        )

    def _direct_reply(
        self,
        request: InferRequest,
        sender: ResponseSender,
        parsed: Request,
        options: ReplyOptions,
    ) -> DirectReply:
        key, client_id = parsed.request_key, request.request_id()
        if client_id:
            self._client_ids[key] = client_id
        return DirectReply(
            self._pb,
            sender,
            parsed,
            options,
            wanted=request.requested_output_names(),
            abort=lambda: self._engine.abort(key),
            ended=lambda: self._client_ids.pop(key, None),
        )

    def _submit(self, request: Request, reply: Reply, inputs: Inputs) -> None:
        """Hand the request to the engine; raises its refusal with the client's field names."""
        emit = self._outbox.open(request.request_key, reply)

        def emit_and_count(output: TokenOutput) -> None:
            emit(output)
            if output.finish_reason is not None:
                self._metrics.touch()

        try:
            self._engine.submit(request, emit_and_count)
        except Exception as error:
            self._outbox.discard(request.request_key)
            reply.refused()
            raise _as_client_spells(error, inputs) from error
        self._metrics.touch()

    def _stop(self, request_key: str, request_id: str, reason: FinishReason) -> None:
        """End a request, or all of one client's id; what is unknown, or has ended, is left."""
        if not request_key and not request_id:
            raise InvalidRequestError(
                "stop", "send the id of the request to stop as this request's id, or a request_key"
            )
        if request_key:
            keys = [RequestKey(request_key)]
        else:
            keys = [key for key, sent in list(self._client_ids.items()) if sent == request_id]
        for key in keys:
            found = self._engine.abort(key, reason)
            request_logger(_logger, key).info("abort: %s", "stopping" if found else "had ended")

    def _leave(self) -> None:
        """End the process soon: nothing but a restart helps, and whoever watches it can see that.

        Called once, by a thread of the engine, when that has died.
        """
        threading.Thread(target=self._answer_and_exit, name="leave", daemon=True).start()

    def _answer_and_exit(self) -> None:
        time.sleep(_LEAVE_S)
        self._outbox.close()
        _logger.critical("the engine is dead and its requests are answered: the process ends")
        logging.shutdown()
        self._exit_process(1)


def _as_client_spells(error: Exception, inputs: Inputs) -> Exception:
    """Return the engine's refusal with the field under the name that the client sent."""
    own = {"max_tokens": "request_output_len", "prompt": "input_ids"}
    if isinstance(error, InvalidRequestError) and error.field in own:
        message = str(error).removeprefix(f"{error.field}: ")
        return InvalidRequestError(inputs.field(own[error.field]), message)
    return error
