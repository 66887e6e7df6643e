"""Command lines whose errors are one line that names what the user wrote, in Make's words too."""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from deepseek_triton.errors import DeepseekTritonError

_VARIABLES = frozenset(
    "OUT CHECKPOINT ENGINE PRECISION TARGET PROVIDER DRAFT INT4_ACCURACY METHOD GROUP SYMMETRIC "
    "CALIBRATION TEXT REFERENCE ARCH CONFIG DTYPE SHARDS SEED HOST HTTP_PORT GRPC_PORT "
    "METRICS_PORT GATEWAY_PORT TRITON API_KEYS MAX_BATCH MAX_PREFILL MAX_CHUNK MAX_CONTEXT TP PP "
    "EP SM TIMING_CACHE".split()
)
_ABOUT_ONE = re.compile(r"argument (--[a-z0-9-]+): (.*)", re.DOTALL)


def label(option: str) -> str:
    """Return `option`, which begins with --, beside the Make variable that sets it, if one does."""
    name = option.removeprefix("--").replace("-", "_").upper()
    name = "HOST" if name == "GATEWAY_HOST" else name
    return f"{name} ({option})" if name in _VARIABLES else option


@contextlib.contextmanager
def naming(option: str) -> Iterator[None]:
    """Begin the message of an error of this package, one without a field, with `option`'s label."""
    try:
        yield
    except DeepseekTritonError as error:
        raise type(error)(f"{label(option)}: {error}") from error


def end_as_by_ctrl_c() -> None:
    """Have SIGTERM, SIGHUP and SIGQUIT raise KeyboardInterrupt too, the first of all of them alone.

    So what is half-written is removed, and a second signal does not disturb that. A signal that is
    ignored, as under nohup, stays so.
    """
    stopped = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, which writes a page of usage before an error that knows options alone."""

    def error(self, message: str) -> NoReturn:
        """Write one line and end the process with status 2."""
        match = _ABOUT_ONE.fullmatch(message)
        text = f"{label(match[1])}: {match[2]}" if match else message
        self.exit(2, f"error: {text}\n")


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return an argument's type: a whole number from `least` to `most`."""
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        if re.fullmatch(r"[+-]?[0-9]{1,4000}", text.strip()):  # int takes underscores, too
            value = int(text)
            if value >= least and (most is None or value <= most):
                return value
        raise argparse.ArgumentTypeError(_problem(text, f"a whole number {limits}"))

    return parse


def whole_number_or_empty(least: int, most: int | None = None) -> Callable[[str], int | None]:
    """Return the type of an argument that an empty text leaves at its default, None."""
    parse = whole_number(least, most)
    return lambda text: parse(text) if text else None


def seconds(text: str) -> float:
    """Return a finite number that is not negative; the type of an argument."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(_problem(text, "a number of seconds"))
    return value


def choice(*values: str) -> Callable[[str], str]:
    """Return an argument's type: one of `values`, of which an empty one is the default."""
    named = [value for value in values if value]
    words = " or ".join(filter(None, (", ".join(named[:-1]), named[-1])))

    def parse(text: str) -> str:
        if text in values:
            return text
        raise argparse.ArgumentTypeError(
            _problem(text, f"{words}, or left out" if "" in values else words)
        )

    return parse


def _problem(text: str, allowed: str) -> str:
    return f"{text!r} is not allowed; it must be {allowed}"
