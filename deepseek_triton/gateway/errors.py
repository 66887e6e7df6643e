"""Errors as OpenAI's API gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deepseek_triton.wire import ENSEMBLE, MODELS

_FIELD = re.compile(r"(?:in ensemble '\w+', )?(?P<message>(?P<field>\w+): .*)", re.DOTALL)
_TRY_AGAIN = "try again later"  # ends the message of OverloadedError

# The server's names for what a client of this API sent under another one.
_PARAMS = {
    "text_input": "messages",
    "stop_words": "stop",
    "guided_decoding_guide": "response_format",
    "guided_decoding_guide_type": "response_format",
}
_SERVER_FIELDS = {tensor.ensemble_name for tensor in MODELS[ENSEMBLE].inputs} | {
    "prompt",
    "logit_bias",
    "top_log_probs",
    "deadline_ms",
}


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _encodable(message)
        self.kind = kind
        self.param = None if param is None else _encodable(param)
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the JSON object that the client gets."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def _encodable(text: str) -> str:
    """Return `text`, which may quote the client, with what UTF-8 cannot hold replaced."""
    return text.encode(errors="replace").decode()


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Return a 400 about one parameter."""
    return ApiError(400, message, param=param, code=code)


def not_supported(param: str, message: str) -> ApiError:
    """Return the refusal of something that OpenAI's API has and this one has not."""
    return bad_request(param, f"{param}: {message}", "unsupported_parameter")


def unavailable(message: str, retry_after_s: int = 1) -> ApiError:
    """Return a 503, after which the same request may succeed."""
    return ApiError(
        503,
        message,
        kind="server_error",
        code="service_unavailable",
        headers={"Retry-After": str(retry_after_s)},
    )


def stopping() -> ApiError:
    """Return the 503 of a request that the gateway ends, or does not begin, because it stops."""
    return ApiError(
        503,
        "the gateway is shutting down; send the request again, to another one or a little later",
        kind="server_error",
        code="shutting_down",
        headers={"Retry-After": "1"},
    )


def server_error(message: str) -> ApiError:
    """Return a 500."""
    return ApiError(500, message, kind="server_error", code="internal_error")


def timed_out(seconds: float) -> ApiError:
    """Return a 504: the request took longer than it may."""
    message = f"the request took longer than {seconds:g} seconds; lower max_tokens"
    return ApiError(504, message, kind="server_error", code="timeout")


def from_server(message: str, prompt_param: str) -> ApiError:
    """Return what a Triton server's error message means to the client.

    A stream's errors carry no status, only their message: one that names a field of the request
    is the client's fault. `prompt_param` is what the client calls its prompt.
    """
    match = _FIELD.match(message)
    if match and match["field"] in _SERVER_FIELDS:
        field = match["field"]
        param = prompt_param if field == "text_input" else _PARAMS.get(field, field)
        text = match["message"].replace(f"{field}:", f"{param}:", 1)
        too_long = "context limit" in text or "KV cache" in text
        return bad_request(param, text, "context_length_exceeded" if too_long else None)
    text = re.sub(r"^in ensemble '\w+', ", "", message)
    return unavailable(text) if text.endswith(_TRY_AGAIN) else server_error(text)
