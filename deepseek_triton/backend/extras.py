"""What a request may ask for beyond the contract: request parameters, which reach every stage."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from deepseek_triton.backend.pb import InferRequest, request_parameters
from deepseek_triton.errors import InvalidRequestError

MAX_TOP_LOG_PROBS = 20
_MAX_BIASES = 1024
_MAX_BIAS = 100.0


@dataclass(frozen=True)
class Extras:
    """The parameters of one request, and what absence means."""

    clip_max_tokens: bool = False  # max_tokens is the most that fits, not a promise
    return_token_ids: bool = False
    top_log_probs: int = 0  # likeliest tokens reported in each place
    logit_bias: tuple[tuple[int, float], ...] = ()


def read_extras(request: InferRequest, vocab_size: int) -> Extras:
    """Read and check the parameters; raises InvalidRequestError naming one."""
    parameters = request_parameters(request)
    top = parameters.get("top_log_probs", 0)
    if type(top) is not int or not 0 <= top <= MAX_TOP_LOG_PROBS:
        raise InvalidRequestError(
            "top_log_probs", f"{top!r} is not allowed; it must be from 0 to {MAX_TOP_LOG_PROBS}"
        )
    return Extras(
        clip_max_tokens=_flag(parameters, "clip_max_tokens"),
        return_token_ids=_flag(parameters, "return_token_ids"),
        top_log_probs=min(top, vocab_size),
        logit_bias=_logit_bias(parameters.get("logit_bias"), vocab_size),
    )


def _flag(parameters: dict[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequestError(name, f"{value!r} is neither true nor false")
    return value


def _logit_bias(text: object, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Read a JSON object in a string: token id → what to add to its logit."""
    if text is None:
        return ()
    try:
        content = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise InvalidRequestError("logit_bias", "not a JSON object in a string")
    if len(content) > _MAX_BIASES:
        raise InvalidRequestError(
            "logit_bias", f"{len(content)} tokens; at most {_MAX_BIASES} are allowed"
        )
    found = {}
    for key, bias in content.items():
        # The length first: Python refuses to convert thousands of digits.
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            raise InvalidRequestError(
                "logit_bias", f"{key[:20]!r} is no token id; there are 0 to {vocab_size - 1}"
            )
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not (number and abs(bias) <= _MAX_BIAS):
            raise InvalidRequestError(
                "logit_bias",
                f"{repr(bias)[:40]} of token {key} is not from {-_MAX_BIAS:g} to {_MAX_BIAS:g}",
            )
        found[int(key)] = float(bias)
    return tuple(found.items())
