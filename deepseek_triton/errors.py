"""Every error that this package raises on purpose.

    DeepseekTritonError
    ├── InvalidRequestError          a request that can never succeed as sent; names the field
    │   └── UnsupportedTensorError   a tensor of the contract that this version does not implement
    ├── RequestFailedError           one request of a step failed; the others go on
    ├── RequestCancelledError        the client went away or asked to stop
    ├── OverloadedError              the queue is full; the same request may succeed later
    ├── EngineDeadError              the engine thread stopped; only a restart helps
    ├── ConfigError                  a setting that is unknown or out of range
    ├── CheckpointError              a checkpoint folder that cannot be read as it is
    │   └── UnsupportedModelError    a readable checkpoint of a model that is not supported
    ├── BuildError                   an engine that could not be built
    ├── EngineMismatchError          an engine directory that this version or machine cannot load
    ├── TokenizerError               a tokenizer that would not round-trip
    └── ServerError                  tritonserver is missing, did not start, or a port is taken

A message says what is wrong, names the field or file, and says the way out.
"""

from __future__ import annotations


class DeepseekTritonError(Exception):
    """Root of the tree; never raised itself. Its errors can be pickled with all they hold."""

    def __reduce__(self) -> tuple[object, ...]:
        # By default an error is made anew from its message alone, which not every class here takes.
        return _remake, (type(self), self.args, vars(self))


class InvalidRequestError(DeepseekTritonError):
    """A request that can never succeed as sent.

    `field` is the tensor or parameter at fault, as the client spells it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class UnsupportedTensorError(InvalidRequestError):
    """A tensor of the contract, sent with a non-default value, that is not implemented."""


class RequestFailedError(DeepseekTritonError):
    """One request failed while it ran; the engine and the other requests go on.

    `request_key` is the request at fault.
    """

    def __init__(self, request_key: str, message: str) -> None:
        super().__init__(message)
        self.request_key = request_key


class RequestCancelledError(DeepseekTritonError):
    """The client cancelled, disconnected or ran past its deadline."""


class OverloadedError(DeepseekTritonError):
    """The server holds as many requests as it may; try again later."""


class EngineDeadError(DeepseekTritonError):
    """The engine thread stopped on an error; the server must be restarted."""


class ConfigError(DeepseekTritonError):
    """A configuration key or value that is unknown or out of range."""


class CheckpointError(DeepseekTritonError):
    """A checkpoint folder with a missing, truncated or misshapen part."""


class UnsupportedModelError(CheckpointError):
    """A checkpoint whose architecture or feature is not supported."""


class BuildError(DeepseekTritonError):
    """An engine directory that could not be built or written."""


class EngineMismatchError(DeepseekTritonError):
    """An engine directory that does not fit this version, or whose files changed."""


class TokenizerError(DeepseekTritonError):
    """A tokenizer whose output does not decode back to its input."""


class ServerError(DeepseekTritonError):
    """tritonserver is missing, failed to start, or its port is in use."""


def _remake(
    cls: type[DeepseekTritonError], args: tuple[object, ...], fields: dict[str, object]
) -> DeepseekTritonError:
    error = cls.__new__(cls, *args)
    vars(error).update(fields)
    return error


# Name of the matching constant on pb_utils.TritonError. The most specific class wins.
TRITON_STATUS: dict[type[DeepseekTritonError], str] = {
    DeepseekTritonError: "INTERNAL",
    InvalidRequestError: "INVALID_ARG",
    RequestCancelledError: "CANCELLED",
    OverloadedError: "UNAVAILABLE",
    EngineDeadError: "UNAVAILABLE",
}


def triton_status(error: BaseException) -> str:
    """Return the pb_utils.TritonError constant's name for `error` ("INTERNAL" if unknown)."""
    for cls in type(error).__mro__:
        if cls in TRITON_STATUS:
            return TRITON_STATUS[cls]
    return "INTERNAL"
