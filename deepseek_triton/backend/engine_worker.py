"""The process of the engine: it loads the model, steps, and answers the server's process.

link ──▶ reader thread ──▶ main thread: submit, abort, call ──▶ EngineLoop
link ◀── the outputs of a step, in one message ◀── sender thread of the loop

The end of the link ends it at once, whatever it does: it never outlives the server's process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NoReturn

from deepseek_triton.backend.opening import EngineLimits, open_engine
from deepseek_triton.config import EngineConfig
from deepseek_triton.engine.delivery import Deliveries
from deepseek_triton.engine.link import (
    COMPILE,
    Abort,
    Answer,
    Call,
    Close,
    Link,
    Submit,
    pack_outputs,
)
from deepseek_triton.engine.loop import EngineLoop
from deepseek_triton.errors import DeepseekTritonError, EngineDeadError
from deepseek_triton.log import configure_logging
from deepseek_triton.request import Request, TokenOutput
from deepseek_triton.text.guide import Guides, GuideText

_logger = logging.getLogger(__name__)

_KEPT_GUIDES = 64  # each is compiled when it is announced, and used at once by its request

OpenLoop = Callable[..., tuple[EngineLoop, EngineLimits]]


def main(descriptor: int, open_loop: OpenLoop = open_engine) -> NoReturn:
    """Serve the connected socket `descriptor`, whose first message is the EngineConfig."""
    # A Ctrl-C reaches every process of a server in the foreground, which then drains its requests.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = Link(Connection(descriptor))
    try:
        config: EngineConfig = link.receive()
        configure_logging(config.log_level)
        inbox: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=_read, args=(link, inbox), name="link-read", daemon=True).start()
        _serve(link, inbox, config, open_loop)
    except EOFError:
        _leave(1)
    except BaseException:
        _logger.exception("the engine's process ends")
        _leave(1)
    _leave(0)


def _leave(status: int) -> NoReturn:
    """End the process. The interpreter's own way out may wait for a step that hangs."""
    logging.shutdown()
    os._exit(status)


def _read(link: Link, inbox: SimpleQueue[Any]) -> None:
    try:
        while True:
            inbox.put(link.receive())
    except EOFError:
        _leave(1)


def _serve(link: Link, inbox: SimpleQueue[Any], config: EngineConfig, open_loop: OpenLoop) -> None:
    def deliver(deliveries: Deliveries) -> None:
        try:
            link.send(pack_outputs(deliveries))
        except Exception:  # without outputs every request would wait for ever
            _logger.exception("the engine's process ends: outputs cannot be sent")
            _leave(1)

    try:
        loop, limits = open_loop(config, deliver=deliver, on_death=partial(_leave, 1))
    except Exception as error:
        if not isinstance(error, DeepseekTritonError):
            _logger.exception("the engine did not load")
        link.send(error if _is_known(error) else RuntimeError(f"{type(error).__name__}: {error}"))
        return
    guides, limits = limits.guides, dataclasses.replace(limits, guides=None)
    link.send((loop.admission, limits, guides is not None))
    worker = _Worker(link, loop, guides)
    while not isinstance(message := inbox.get(), Close):
        worker.take(message)
    loop.close()


def _is_known(error: Exception) -> bool:
    """Whether the server's process can make this error from its pickle, without torch and such."""
    return isinstance(error, DeepseekTritonError) or type(error).__module__ == "builtins"


class _Worker:
    """Passes the messages of the server's process to the loop."""

    def __init__(self, link: Link, loop: EngineLoop, guides: Guides | None) -> None:
        self._link = link
        self._loop = loop
        self._compile = None if guides is None else lru_cache(_KEPT_GUIDES)(guides.compile)

    def take(self, message: Submit | Abort | Call) -> None:
        """Do what `message` asks for."""
        if isinstance(message, Submit):
            self._submit(message.request)
        elif isinstance(message, Abort):
            self._loop.abort(message.request_key, message.reason)
        else:
            self._link.send(self._answer(message))

    def _submit(self, request: Request) -> None:
        if isinstance(request.guide, GuideText) and self._compile is not None:
            guide = self._compile(request.guide.kind, request.guide.text)
            request = dataclasses.replace(request, guide=guide)
        # It was checked before it was sent. If the engine has died, the end of this process
        # answers it.
        with contextlib.suppress(EngineDeadError):
            self._loop.submit(request, _nobody)

    def _answer(self, call: Call) -> Answer:
        try:
            if call.name == COMPILE and self._compile is not None:
                self._compile(*call.arguments)
                return Answer(call.number)
            return Answer(call.number, self._loop.stats())
        except DeepseekTritonError as error:
            return Answer(call.number, error=error)


def _nobody(output: TokenOutput) -> None:
    """Receives nothing: the outputs of a step are sent together."""
