"""Handing outputs to whoever asked, so that one broken receiver harms nobody else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from deepseek_triton.engine.state import Emit
from deepseek_triton.log import request_logger
from deepseek_triton.request import RequestKey, TokenOutput

Deliveries = Sequence[tuple[Emit, TokenOutput]]

_logger = logging.getLogger(__name__)


class Delivery:
    """Calls each receiver in order. One that raises gets nothing more but its last output."""

    def __init__(self, abort: Callable[[RequestKey], object]) -> None:
        self._abort = abort
        self._broken: set[RequestKey] = set()

    def __call__(self, deliveries: Deliveries) -> None:
        """Send `deliveries`; never raises because of a receiver."""
        for emit, output in deliveries:
            key = output.request_key
            last = output.finish_reason is not None
            if last:
                self._broken.discard(key)
            elif key in self._broken:
                continue
            try:
                emit(output)
            except Exception:
                request_logger(_logger, key).exception("output %d was not taken", output.index)
                if not last:
                    self._broken.add(key)
                    self._abort(key)
