"""The back-edge of the ensemble: postprocessing tells the engine to stop a request."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue

import numpy as np

from deepseek_triton.backend.pb import Pb, text_tensor
from deepseek_triton.log import request_logger
from deepseek_triton.request import FinishReason
from deepseek_triton.wire import ENGINE

_logger = logging.getLogger(__name__)


class Aborter:
    """Sends aborts from a thread of its own: each takes about a millisecond."""

    def __init__(self, pb: Pb) -> None:
        self._pb = pb
        self._aborts: SimpleQueue[tuple[str, FinishReason] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="aborter", daemon=True)
        self._thread.start()

    def abort(self, request_key: str, reason: FinishReason) -> None:
        """End a request in the engine, soon, for `reason`; harmless if it has ended."""
        self._aborts.put((request_key, reason))

    def close(self) -> None:
        """Send what is queued and stop."""
        self._aborts.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        nothing = np.zeros((1, 1), np.int32)  # inputs that the contract requires of every request
        while (abort := self._aborts.get()) is not None:
            key, reason = abort
            tensors = {
                "request_key": text_tensor(key),
                "stop": np.ones((1, 1), np.bool_),
                "input_lengths": nothing,
                "request_output_len": nothing,
            }
            try:
                for _ in self._pb.call(ENGINE, tensors, {"finish_reason": reason.value}):
                    pass
            except Exception:
                request_logger(_logger, key).exception("abort failed; its deadline will end it")
