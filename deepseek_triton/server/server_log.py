"""The server's log: copied on as it comes, and searched for the reason of a failure."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Sequence
from typing import IO

_KEPT_LINES = 2000
_SHOWN_LINES = 8

# A model's own words, as Triton quotes them when the model fails to load.
_LOAD_FAILURE = re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.*)")
# An ensemble that cannot load because one of its models did not: a consequence, never the cause.
_CONSEQUENCE = re.compile(r"ensemble '[^']*' depends on|Invalid argument: ensemble")
_ERROR_LINE = re.compile(
    r"^E\d{4} |^error: |error while loading shared libraries|^Traceback|Error: "
)
# All that Triton knows of a model's process that ended while it loaded.
_DIED = re.compile(r"Stub process '[^']*' is not healthy\.")
_WHY_DIED = (
    "its process ended while it loaded; if memory ran out, `dmesg` says so: free some, or build a "
    "smaller engine (INT4: make quantize)"
)
# What Triton's GPU code says on any machine without one.
_HARMLESS = re.compile(r"NVML|CudaDriverHelper|DCGM")


class LogCopier(threading.Thread):
    """Copies the server's output to `sink` and keeps its last lines."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        super().__init__(name="server-log", daemon=True)
        self._source = source
        self._sink: IO[bytes] | None = sink
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def run(self) -> None:
        """Copy until the server's end of the pipe closes."""
        for line in self._source:
            self._lines.append(line.decode(errors="replace").rstrip())
            self._copy(line)

    def lines(self) -> list[str]:
        """Return the last lines, oldest first."""
        return list(self._lines)

    def _copy(self, line: bytes) -> None:
        if self._sink is None:
            return
        try:
            self._sink.write(line)
            self._sink.flush()
        except (OSError, ValueError):
            self._sink = None  # the terminal is gone: the server must not block on its log


def failure_reason(lines: Sequence[str]) -> str:
    """Return why the server did not start: the models' own messages first, one a line."""
    failures = [m for line in lines if (m := _LOAD_FAILURE.search(line))]
    causes = [m for m in failures if not _CONSEQUENCE.search(m["reason"])]
    if causes:
        models: dict[str, list[str]] = {}  # by message: one fault often fails several models
        for m in causes:
            names = models.setdefault(_own_words(m["reason"]), [])
            names += [m["model"]] if m["model"] not in names else []
        return "\n".join(f"model {', '.join(names)}: {text}" for text, names in models.items())
    errors = [x for x in lines if _ERROR_LINE.search(x) and not _HARMLESS.search(x)]
    shown = errors[:_SHOWN_LINES] or list(lines)[-_SHOWN_LINES:]
    return "\n".join(shown) or "it wrote nothing"


def _own_words(reason: str) -> str:
    """Cut Triton's status, its quoting and the traceback off a model's message."""
    text = reason.removesuffix('"').replace("\\n", "\n").replace('\\"', '"')
    text = text.partition("\n\nAt:\n")[0]
    text = re.sub(r"^(Internal|Invalid argument|Unavailable|Unknown|Not found): ", "", text).strip()
    return f"{text} {_WHY_DIED}" if _DIED.fullmatch(text) else text
