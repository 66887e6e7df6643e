"""What is known of one HTTP request for its log line and the metrics; never its texts."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

_logger = logging.getLogger("deepseek_triton.gateway.access")

_PROBES = ("/health", "/ready", "/metrics")  # asked for all the time by machines

Scope = MutableMapping[str, Any]


@dataclass
class RequestRecord:
    """Filled while a request is answered."""

    request_id: str
    method: str
    path: str
    started: float = field(default_factory=time.perf_counter)
    key: str = ""
    model: str = ""
    stream: bool = False
    status: int = 0
    first_token_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    error: str = ""  # code or type of the error that the client got
    disconnected: bool = False

    def note_first_token(self) -> None:
        """Called with each piece; the first one counts."""
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.started

    def log(self, seconds: float) -> None:
        """Write the log line: a JSON object."""
        line: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(seconds, 4),
        }
        if self.first_token_s is not None:
            line["first_token_seconds"] = round(self.first_token_s, 4)
            if self.prompt_tokens:  # comes with the end of an answer
                line["prompt_tokens"] = self.prompt_tokens
            line["completion_tokens"] = self.completion_tokens
            line["finish_reasons"] = self.finish_reasons
        optional = ("key", "model", "stream", "error", "disconnected")
        line |= {name: getattr(self, name) for name in optional if getattr(self, name)}
        level = logging.DEBUG if self.path in _PROBES else logging.INFO
        _logger.log(level, "%s", json.dumps(line))


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of a request by its ASGI scope."""
    record: RequestRecord = scope["deepseek_triton.record"]
    return record


def attach(scope: Scope, record: RequestRecord) -> None:
    """Let `record_of` find it."""
    scope["deepseek_triton.record"] = record
