"""Messages between the process of the server and that of the engine.

The engine's process must spend as little of its interpreter as it can on them, so the outputs of a
step are one message, of plain tuples.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from deepseek_triton.engine.delivery import Deliveries
from deepseek_triton.errors import DeepseekTritonError
from deepseek_triton.request import FinishReason, Request, RequestKey, RequestStats, TokenOutput


@dataclass(frozen=True)
class Submit:
    """To the engine: a request, checked already."""

    request: Request


@dataclass(frozen=True)
class Abort:
    """To the engine: end a request, if it still runs."""

    request_key: RequestKey
    reason: FinishReason


STATS, COMPILE = "stats", "compile"  # what a Call may ask for: EngineStats; that a guide compiles


@dataclass(frozen=True)
class Call:
    """To the engine: a question that gets an Answer of the same number."""

    number: int
    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Answer:
    """From the engine: the value, or the error."""

    number: int
    value: Any = None
    error: DeepseekTritonError | None = None


@dataclass(frozen=True)
class Close:
    """To the engine: cancel what runs, send all outputs, free the model and end."""


class Link:
    """One end of a connection. Any thread may send; one receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Send a message; raises OSError when the other side is gone."""
        data = pickle.dumps(message, 5)
        with self._sending:
            self._connection.send_bytes(data)

    def receive(self) -> Any:
        """Wait for a message; raises EOFError when the other side is gone."""
        try:
            return pickle.loads(self._connection.recv_bytes())
        except ConnectionError:
            raise EOFError from None

    def close(self) -> None:
        """Let go of this end; idempotent."""
        with contextlib.suppress(OSError):
            self._connection.close()


def pack_outputs(deliveries: Deliveries) -> list[tuple[Any, ...]]:
    """Return the outputs of a step as tuples, which pickle ten times faster than the objects."""
    packed = []
    for _, output in deliveries:
        stats = output.stats
        packed.append(
            (
                output.request_key,
                output.index,
                output.token_ids,
                output.log_probs,
                output.cum_log_prob,
                output.num_input_tokens,
                output.num_output_tokens,
                output.finish_reason,
                output.error,
                (
                    stats.arrival_time_ns,
                    stats.first_scheduled_time_ns,
                    stats.first_token_time_ns,
                    stats.last_token_time_ns,
                    stats.kv_blocks_allocated,
                    stats.kv_blocks_reused,
                    stats.preemptions,
                ),
                output.top_log_probs,
            )
        )
    return packed


def unpack_output(packed: tuple[Any, ...]) -> TokenOutput:
    """Return the output that `pack_outputs` made a tuple of."""
    key, index, token_ids, log_probs, cum, num_input, num_output, reason, error, stats, top = packed
    return TokenOutput(
        key,
        index,
        token_ids,
        log_probs,
        cum,
        num_input,
        num_output,
        reason,
        error,
        RequestStats(*stats),
        top,
    )
