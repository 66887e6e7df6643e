"""What pydantic finds wrong, as OpenAI's API says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

from deepseek_triton.gateway.errors import ApiError, bad_request


def validation_error(error: RequestValidationError) -> ApiError:
    """Return the first complaint, with the path of what it is about."""
    first: dict[str, Any] = max(error.errors(), key=_nearness, default={})
    kind, message = first.get("type", ""), str(first.get("msg", "not valid"))
    location = list(first.get("loc", ()))[1:]
    if kind == "json_invalid":
        return bad_request(None, "the request's body is not valid JSON")
    if not location and not isinstance(error.body, dict):
        # curl -d says that its data is a form unless it is told otherwise.
        return bad_request(
            None, "send a JSON object, with the header Content-Type: application/json"
        )
    if kind == "unsupported_parameter":
        return bad_request(first["ctx"]["param"], message, "unsupported_parameter")
    param = _path(location, error.body, missing=kind in ("missing", "extra_forbidden"))
    if kind == "extra_forbidden":
        return bad_request(param, f"Unknown parameter: '{param}'.", "unknown_parameter")
    if kind == "missing":
        what = f"Missing required parameter: '{param}'." if param else "a JSON object is needed"
        return bad_request(param or None, what, "missing_required_parameter")
    return bad_request(param or None, f"{param or 'body'}: {message}", "invalid_value")


def _nearness(error: Any) -> tuple[int, bool]:
    """Of a union's complaints, the one that went furthest is about the form that was meant.

    Of two that went as far it is the one that found no wrong type: a list that is too long is not
    told to be a string.
    """
    return len(error.get("loc", ())), not str(error.get("type", "")).endswith("_type")


def _path(location: Sequence[Any], body: Any, *, missing: bool) -> str:
    """Return `location` as messages[0].content, without pydantic's names of union members.

    Those are told by not being there in the body. The last part of something `missing` is not
    there either, but belongs to the path.
    """
    path = ""
    for index, part in enumerate(location):
        last = index == len(location) - 1
        if isinstance(part, int) and isinstance(body, list) and part < len(body):
            path += f"[{part}]"
            body = body[part]
        elif isinstance(body, dict) and part in body:
            path += f".{part}" if path else str(part)
            body = body[part]
        elif last and missing:
            path += f".{part}" if path else str(part)
    return path
