"""Where log lines go and what they look like: time, level, module, request key if any, message."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # generic only from Python 3.11 on

_PACKAGE = "deepseek_triton"


class _Formatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z WARNING deepseek_triton.engine.loop [key] message`."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        key = getattr(record, "request_key", None)
        record.request = "" if key is None else f" [{key}]"
        return super().format(record)


class _RequestAdapter(_Adapter):
    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[object, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


def configure_logging(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send the package's log lines of at least `level` to `stream` (default: stderr).

    Replaces what an earlier call set up; loggers outside this package stay as they are.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        _Formatter(
            "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s%(request)s %(message)s",
            datefmt="%Y-%m-%dT%H:%M:%S",
        )
    )
    logger = logging.getLogger(_PACKAGE)
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


def request_logger(logger: logging.Logger, request_key: str) -> _RequestAdapter:
    """Return `logger` with `request_key` in each of its lines."""
    return _RequestAdapter(logger, {"request_key": request_key})
