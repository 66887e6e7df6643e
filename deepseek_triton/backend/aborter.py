"""The back-edge of the ensemble: postprocessing tells the engine to stop a request."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue

import numpy as np

from deepseek_triton.backend.pb import Pb, text_tensor
from deepseek_triton.log import request_logger
from deepseek_triton.wire import ENGINE

_logger = logging.getLogger(__name__)


class Aborter:
    """Sends aborts from a thread of its own: each takes about a millisecond."""

    def __init__(self, pb: Pb) -> None:
        self._pb = pb
        self._keys: SimpleQueue[str | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="aborter", daemon=True)
        self._thread.start()

    def abort(self, request_key: str) -> None:
        """End a request in the engine, soon; harmless if it has ended."""
        self._keys.put(request_key)

    def close(self) -> None:
        """Send what is queued and stop."""
        self._keys.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        nothing = np.zeros((1, 1), np.int32)  # inputs that the contract requires of every request
        while (key := self._keys.get()) is not None:
            tensors = {
                "request_key": text_tensor(key),
                "stop": np.ones((1, 1), np.bool_),
                "input_lengths": nothing,
                "request_output_len": nothing,
            }
            try:
                for _ in self._pb.call(ENGINE, tensors):
                    pass
            except Exception:
                request_logger(_logger, key).exception("abort failed; its deadline will end it")
