"""How the engine stage answers: a step of the ensemble, or a client that called it directly."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.backend.engine_request import ReplyOptions
from deepseek_triton.backend.flow import Flow
from deepseek_triton.backend.outbox import merge
from deepseek_triton.backend.packet import StepPacket, TextOptions
from deepseek_triton.backend.pb import Pb, ResponseSender, describe
from deepseek_triton.backend.report import Progress, report_tensors
from deepseek_triton.request import FinishReason, Request, TokenOutput

# Without a stream nobody reads the tokens yet, but postprocessing must see stop strings and
# cancellation in good time: a few tokens of wasted work against a message for each.
_COALESCE_S = 0.05
_POLL_S = 0.25


class EnsembleReply:
    """Answers postprocessing, which turns each response into text."""

    def __init__(
        self, pb: Pb, sender: ResponseSender, request: Request, options: ReplyOptions, flow: Flow
    ) -> None:
        self._pb = pb
        self._flow = flow
        self._sender = sender
        self._key = request.request_key
        self._want_stats = options.return_perf_metrics
        self._options: TextOptions | None = TextOptions(
            stream=options.stream,
            stop=options.stop,
            echo_ids=request.prompt_token_ids if options.echo else (),
            num_input_tokens=len(request.prompt_token_ids),
            return_log_probs=options.return_log_probs,
            return_counts=options.return_counts,
            return_token_ids=options.return_token_ids,
            top_log_probs=request.sampling.top_log_probs,
        )
        self._next_index = 0
        self.interval_s = 0.0 if options.stream else _COALESCE_S

    def send(self, output: TokenOutput) -> None:
        """Send the tokens and a packet."""
        error, status = ("", "") if output.error is None else describe(output.error)
        packet = StepPacket(
            request_key=self._key,
            index=self._next_index,
            options=self._options,
            log_probs=output.log_probs,
            top_log_probs=output.top_log_probs,
            finish_reason=output.finish_reason,
            error=error,
            error_status=status,
            stats=output.stats if self._want_stats else None,
            flow=self._flow.mark(),
        )
        self._send(output.token_ids, packet)

    def beat(self) -> None:
        """Send an empty packet: postprocessing is told of a cancellation, this stage never is."""
        packet = StepPacket(self._key, self._next_index, self._options, flow=self._flow.mark())
        self._send((), packet)

    def refused(self) -> None:
        """Nothing was promised yet."""

    def _send(self, token_ids: tuple[int, ...], packet: StepPacket) -> None:
        tensors = id_tensors(token_ids)
        tensors["step_packet"] = packet.to_tensor()
        self._options = None
        self._next_index += 1
        self._pb.send(self._sender, tensors, final=packet.finish_reason is not None)


class DirectReply:
    """Answers a client of the engine stage itself: ids, and a report with the last response."""

    interval_s = 0.0

    def __init__(
        self,
        pb: Pb,
        sender: ResponseSender,
        request: Request,
        options: ReplyOptions,
        *,
        wanted: Collection[str],
        abort: Callable[[], object],
        ended: Callable[[], object],
    ) -> None:
        """`abort` is called once if the client cancels, `ended` when the request is over."""
        self._pb = pb
        self._sender = sender
        self._options = options
        self._wanted = wanted
        self._abort: Callable[[], object] | None = abort
        self._ended = ended
        self._prompt = request.prompt_token_ids if options.echo else ()
        self._held: list[TokenOutput] = []
        self._next_poll = 0.0

    def send(self, output: TokenOutput) -> None:
        """Send one response for each output of a stream, else one when the request has ended."""
        self._poll()
        self._held.append(output)
        last = output.finish_reason is not None
        if self._options.stream or last:
            outputs, self._held = self._held, []
            self._respond(merge(outputs))
        if last:
            self._ended()

    def beat(self) -> None:
        """Look whether the client cancelled."""
        self._poll()

    def refused(self) -> None:
        """Let go of the client's id."""
        self._ended()

    def _poll(self) -> None:
        now = time.monotonic()
        if self._abort is None or now < self._next_poll:
            return
        self._next_poll = now + _POLL_S
        if self._sender.is_cancelled():
            abort, self._abort = self._abort, None
            abort()

    def _respond(self, output: TokenOutput) -> None:
        if output.finish_reason is FinishReason.ERROR and output.error is not None:
            self._pb.fail(self._sender, *describe(output.error))
            return
        tensors = id_tensors(self._prompt + output.token_ids)
        self._prompt = ()
        tensors |= report_tensors(
            Progress(
                num_input_tokens=output.num_input_tokens,
                num_output_tokens=output.num_output_tokens,
                counts=self._options.return_counts,
                log_probs=output.log_probs if self._options.return_log_probs else None,
                cum_log_prob=output.cum_log_prob,
                finish_reason=output.finish_reason,
                stats=output.stats if self._options.return_perf_metrics else None,
            )
        )
        tensors = {name: array for name, array in tensors.items() if name in self._wanted}
        self._pb.send(self._sender, tensors, final=output.finish_reason is not None)


def id_tensors(token_ids: tuple[int, ...]) -> dict[str, NDArray[Any]]:
    """Return output_ids [1, 1, n] and sequence_length [1, 1]."""
    return {
        "output_ids": np.array([[token_ids]], np.int32),
        "sequence_length": np.array([[len(token_ids)]], np.int32),
    }
