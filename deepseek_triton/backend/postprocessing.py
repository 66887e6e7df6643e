"""The model `postprocessing`: token ids become text, and a finished or forsaken request ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.backend.aborter import Aborter
from deepseek_triton.backend.flow import FlowReport
from deepseek_triton.backend.packet import StepPacket, TextOptions
from deepseek_triton.backend.pb import (
    Arrays,
    InferRequest,
    Pb,
    ResponseSender,
    describe,
    model_parameters,
    text_tensor,
)
from deepseek_triton.backend.report import Progress, report_tensors
from deepseek_triton.backend.text_stream import TextPiece, TextStream
from deepseek_triton.build.engine_dir import load_engine_dir
from deepseek_triton.config import EngineConfig
from deepseek_triton.errors import DeepseekTritonError, InvalidRequestError
from deepseek_triton.log import configure_logging, request_logger
from deepseek_triton.request import FinishReason
from deepseek_triton.text.tokenizer import Tokenizer

_logger = logging.getLogger(__name__)

_CANCEL_POLL_S = 0.1  # asking costs a round trip to the server
_SWEEP_S = 60.0


class _Conversation:
    """What is known of one request between its packets."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self.options = options
        self.text = TextStream(tokenizer, options)
        self.next_index = 0
        self.next_poll = 0.0
        self.last_seen = 0.0
        self.closed = False  # the client has its last response, or is gone


class Postprocessing:
    """What Triton calls. One instance, one thread; packets of a request come in order.

    Each packet is a request of its own to this model; each is answered by one response or by none.
    The last packet of a request drops its state. The ensemble ends when the engine stage and every
    packet have ended, so a request that ends early here (stop string, cancellation) is aborted in
    the engine and its remaining packets are swallowed.
    """

    def __init__(self, pb: Pb | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._pb = pb or Pb()
        self._clock = clock
        self._conversations: dict[str, _Conversation] = {}
        self._flow = FlowReport()

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer of the engine directory; an error fails the load of the model."""
        config = EngineConfig.from_parameters(model_parameters(args))
        configure_logging(config.log_level)
        engine_dir = load_engine_dir(Path(config.engine_dir), verify_contents=False)
        self.start(Tokenizer.load(engine_dir.path), config.deadline.max_ms / 1000)

    def start(self, tokenizer: Tokenizer, longest_request_s: float) -> None:
        """Begin to work; no request may live longer than `longest_request_s`."""
        self._tokenizer = tokenizer
        self._aborter = Aborter(self._pb)
        self._stale_s = longest_request_s + _SWEEP_S
        self._next_sweep = self._clock() + _SWEEP_S

    def execute(self, requests: Sequence[InferRequest]) -> None:
        """Answer each request by itself."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._take(request, sender)
            except Exception as error:
                if not isinstance(error, DeepseekTritonError):
                    _logger.exception("request %r failed", request.request_id())
                self._pb.fail(sender, *describe(error))
        self._sweep()

    def finalize(self) -> None:
        """Send the aborts that wait."""
        self._aborter.close()

    @property
    def num_conversations(self) -> int:
        """Requests whose last packet has not come."""
        return len(self._conversations)

    def _take(self, request: InferRequest, sender: ResponseSender) -> None:
        arrays = self._pb.inputs(request)
        if "STEP_PACKET" not in arrays:
            texts = decode_batch(self._tokenizer, arrays["TOKENS_BATCH"], arrays["SEQUENCE_LENGTH"])
            self._pb.send(sender, {"OUTPUT": texts}, final=True)
            return
        try:
            packet = StepPacket.from_tensor(arrays["STEP_PACKET"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequestError("STEP_PACKET", f"not from the engine ({error})") from error
        try:
            self._take_packet(packet, arrays, request, sender)
        finally:
            if packet.flow is not None:
                self._flow.handled(packet.flow)

    def _take_packet(
        self, packet: StepPacket, arrays: Arrays, request: InferRequest, sender: ResponseSender
    ) -> None:
        conversation = self._conversation(packet)
        if conversation is None or conversation.closed:
            self._pb.finish(sender)
            return
        token_ids = arrays["TOKENS_BATCH"].reshape(-1).tolist()
        try:
            if self._client_is_gone(conversation, request):
                request_logger(_logger, packet.request_key).info("cancelled by the client")
                self._close(conversation, packet)
                self._pb.finish(sender)
                return
            conversation.text.push(
                token_ids, packet.log_probs, packet.finish_reason, packet.top_log_probs
            )
            self._respond(conversation, packet, bool(token_ids), sender)
        except Exception:
            self._close(conversation, packet)
            raise

    def _conversation(self, packet: StepPacket) -> _Conversation | None:
        """Return the state of the packet's request, None if the request has ended here."""
        key = packet.request_key
        conversation = self._conversations.get(key)
        if conversation is None:
            if packet.options is None:
                return None
            conversation = self._conversations[key] = _Conversation(self._tokenizer, packet.options)
        if packet.finish_reason is not None:
            del self._conversations[key]
        if packet.index != conversation.next_index and not conversation.closed:
            self._close(conversation, packet)
            raise RuntimeError(
                f"output {conversation.next_index} of the engine is missing, {packet.index} came"
            )
        conversation.next_index = packet.index + 1
        conversation.last_seen = self._clock()
        return conversation

    def _client_is_gone(self, conversation: _Conversation, request: InferRequest) -> bool:
        now = self._clock()
        if now < conversation.next_poll:
            return False
        conversation.next_poll = now + _CANCEL_POLL_S
        return request.is_cancelled()

    def _respond(
        self,
        conversation: _Conversation,
        packet: StepPacket,
        has_tokens: bool,
        sender: ResponseSender,
    ) -> None:
        options, text = conversation.options, conversation.text
        if text.finish_reason is None:
            if options.stream and has_tokens:
                self._pb.send(sender, self._tensors(conversation, packet), final=True)
            else:
                self._pb.finish(sender)
            return
        if text.finish_reason is FinishReason.ERROR:
            if options.stream:  # the text held back, and the reason, before the error itself
                self._pb.send(sender, self._tensors(conversation, packet), final=False)
            self._pb.fail(sender, packet.error, packet.error_status)
        else:
            self._pb.send(sender, self._tensors(conversation, packet), final=True)
        self._close(conversation, packet)

    def _tensors(self, conversation: _Conversation, packet: StepPacket) -> dict[str, NDArray[Any]]:
        options, text = conversation.options, conversation.text
        piece = text.take()
        return {
            "OUTPUT": text_tensor(piece.text),
            **token_tensors(piece, options),
            **report_tensors(
                Progress(
                    num_input_tokens=options.num_input_tokens,
                    num_output_tokens=text.num_output_tokens,
                    counts=options.return_counts,
                    log_probs=piece.log_probs if options.return_log_probs else None,
                    cum_log_prob=text.cum_log_prob,
                    finish_reason=text.finish_reason,
                    stats=packet.stats,
                )
            ),
        }

    def _close(self, conversation: _Conversation, packet: StepPacket) -> None:
        """Answer the request no more; stop the engine's work for it if there is some."""
        if not conversation.closed:
            conversation.closed = True
            if packet.finish_reason is None:
                stopped = conversation.text.finish_reason is FinishReason.STOP
                self._aborter.abort(
                    packet.request_key, FinishReason.STOP if stopped else FinishReason.CANCELLED
                )

    def _sweep(self) -> None:
        """Drop what a lost last packet would leave behind for ever."""
        now = self._clock()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_S
        for key, conversation in list(self._conversations.items()):
            if now - conversation.last_seen > self._stale_s:
                request_logger(_logger, key).warning("dropped: the engine went silent")
                del self._conversations[key]


def token_tensors(piece: TextPiece, options: TextOptions) -> dict[str, NDArray[Any]]:
    """Return what was asked for by request parameter: ids [1, 1, n], likeliest tokens [1, n, k]."""
    tensors: dict[str, NDArray[Any]] = {}
    if options.return_token_ids:
        tensors["output_token_ids"] = np.array([[piece.token_ids]], np.int32)
    if options.top_log_probs:
        shape = (1, len(piece.top_log_probs), options.top_log_probs)
        pairs = [pair for top in piece.top_log_probs for pair in top]
        ids = np.array([token_id for token_id, _ in pairs], np.int32)
        values = np.array([value for _, value in pairs], np.float32)
        tensors["top_token_ids"] = ids.reshape(shape)
        tensors["top_log_probs"] = values.reshape(shape)
    return tensors


def decode_batch(
    tokenizer: Tokenizer, tokens: NDArray[np.int32], lengths: NDArray[np.int32]
) -> NDArray[np.object_]:
    """Return the texts [B, N] of whole sequences: ids [B, N, T], of which `lengths` [B, N] count.

    Raises InvalidRequestError for lengths that do not fit.
    """
    if lengths.shape != tokens.shape[:2]:
        raise InvalidRequestError(
            "SEQUENCE_LENGTH", f"shape {lengths.shape}, but TOKENS_BATCH has {tokens.shape}"
        )
    if ((lengths < 0) | (lengths > tokens.shape[2])).any():
        raise InvalidRequestError("SEQUENCE_LENGTH", f"must be from 0 to {tokens.shape[2]}")
    texts = np.empty(lengths.shape, np.object_)
    for index in np.ndindex(*lengths.shape):
        ids = [token_id for token_id in tokens[index][: lengths[index]].tolist() if token_id >= 0]
        texts[index] = tokenizer.decode(ids).encode()
    return texts
