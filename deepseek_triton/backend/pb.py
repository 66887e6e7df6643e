"""The one place that touches Triton's Python backend; all else is tested without a server."""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.errors import DeepseekTritonError, InvalidRequestError, triton_status

Arrays = Mapping[str, NDArray[Any]]
"""Tensors by name. STRING tensors are arrays of bytes objects."""


class ResponseSender(Protocol):
    """Sends the responses of one request of a decoupled model; any thread may use it."""

    def send(self, response: Any = None, flags: int = 0) -> None:
        """Send one response, or the flags alone; returns when Triton has taken it."""

    def is_cancelled(self) -> bool:
        """Ask Triton whether the client cancelled; costs a round trip to the server."""


class InferRequest(Protocol):
    """One request as Triton hands it to execute()."""

    def inputs(self) -> list[Any]:
        """Return the tensors that were sent."""

    def request_id(self) -> str:
        """Return the id that the client chose, or ""."""

    def parameters(self) -> str:
        """Return the request's parameters, a JSON object; those of an ensemble reach each step."""

    def requested_output_names(self) -> Collection[str]:
        """Return the outputs that somebody reads."""

    def is_cancelled(self) -> bool:
        """Ask Triton whether the client cancelled; costs a round trip to the server."""

    def get_response_sender(self) -> ResponseSender:
        """Return the sender of a decoupled model."""


class Pb:
    """triton_python_backend_utils with arrays and statuses in place of its objects."""

    def __init__(self, utils: Any = None) -> None:
        """`utils` defaults to the module that exists only inside a Triton stub process."""
        self._utils = utils or importlib.import_module("triton_python_backend_utils")
        self._final = self._utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

    def inputs(self, request: InferRequest) -> dict[str, NDArray[Any]]:
        """Return the tensors of `request` by name."""
        return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}

    def response(self, tensors: Arrays) -> Any:
        """Return a response that holds `tensors`."""
        make = self._utils.Tensor
        return self._utils.InferenceResponse([make(name, a) for name, a in tensors.items()])

    def error_response(self, message: str, status: str) -> Any:
        """Return a response that carries an error; `status` names a pb_utils.TritonError code."""
        code = getattr(self._utils.TritonError, status)
        return self._utils.InferenceResponse([], self._utils.TritonError(message, code))

    def send(self, sender: ResponseSender, tensors: Arrays, *, final: bool) -> None:
        """Send one response; `final` ends the request."""
        sender.send(self.response(tensors), flags=self._final if final else 0)

    def fail(self, sender: ResponseSender, message: str, status: str) -> None:
        """End the request with an error response."""
        sender.send(self.error_response(message, status), flags=self._final)

    def finish(self, sender: ResponseSender) -> None:
        """End the request without a further response."""
        sender.send(flags=self._final)

    def call(self, model: str, tensors: Arrays, parameters: Mapping[str, str]) -> Iterator[Any]:
        """Send a request to another model of this server and yield its responses, blocking."""
        utils = self._utils
        request = utils.InferenceRequest(
            model_name=model,
            requested_output_names=[],
            inputs=[utils.Tensor(name, array) for name, array in tensors.items()],
            parameters=dict(parameters),
        )
        yield from request.exec(decoupled=True)

    def metric_family(self, name: str, help_text: str, *, counter: bool) -> Any:
        """Register a metric at Triton's metrics endpoint."""
        family = self._utils.MetricFamily
        return family(
            name=name, description=help_text, kind=family.COUNTER if counter else family.GAUGE
        )


def describe(error: BaseException) -> tuple[str, str]:
    """Return the message that a client gets for `error`, and its status."""
    if isinstance(error, DeepseekTritonError):
        return str(error), triton_status(error)
    return f"internal error ({type(error).__name__}): {error}", triton_status(error)


def model_parameters(args: Mapping[str, str]) -> dict[str, str]:
    """Return the `parameters` of config.pbtxt from the arguments of initialize()."""
    parameters = json.loads(args["model_config"]).get("parameters", {})
    return {key: value.get("string_value", "") for key, value in parameters.items()}


def request_parameters(request: InferRequest) -> dict[str, Any]:
    """Return all parameters of a request."""
    text = request.parameters()
    parameters: dict[str, Any] = json.loads(text) if text else {}
    return parameters


def request_parameter(request: InferRequest, name: str) -> object:
    """Return the request parameter `name`, None if it was not sent."""
    text = request.parameters()
    if name not in text:  # most requests: spare the parsing
        return None
    value: object = json.loads(text).get(name)
    return value


def request_parameter_int(request: InferRequest, name: str) -> int | None:
    """Return the request parameter `name`, None if it was not sent.

    Raises InvalidRequestError unless it is an integer or spells one.
    """
    value = request_parameter(request, name)
    if value is None:
        return None
    try:
        if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
            return int(value)
    except ValueError:
        pass
    raise InvalidRequestError(name, f"{value!r} is not an integer")


def text_tensor(text: str) -> NDArray[np.object_]:
    """Return a STRING tensor [1, 1]."""
    return np.array([[text.encode()]], np.object_)
