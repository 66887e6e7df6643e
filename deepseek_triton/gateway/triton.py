"""One Triton server as the gateway sees it: is it ready, and the stream of one request."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from deepseek_triton.wire import ENSEMBLE, MODELS

_logger = logging.getLogger(__name__)

_CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 1000),  # the default would leave a restarted one alone
    ("grpc.keepalive_time_ms", 60_000),
]
_PROBE_TIMEOUT_S = 2.0
_DEADLINE_SLACK_S = 5.0  # the engine's own deadline comes first, and gives what there is
_NUMPY = {
    "STRING": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
}
_DTYPES = {tensor.name: tensor.dtype for tensor in MODELS[ENSEMBLE].inputs}
_READ = {"INT32": np.dtype("<i4"), "FP32": np.dtype("<f4")}


class ServerUnavailable(Exception):
    """The server cannot be reached, or went away."""


class ServerRefusal(Exception):
    """The server answered the request with an error."""


class DeadlineExceeded(Exception):
    """The request took longer than it may."""


@dataclass(frozen=True)
class Call:
    """One request for one answer, in the ensemble's terms."""

    request_id: str
    inputs: Mapping[str, Any]  # tensor name → a scalar or a list of them
    parameters: Mapping[str, bool | int | str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("text_output", "finish_reason")
    affinity: str = ""  # calls with equal ones profit from being on the same server
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Piece:
    """One response: the text that it adds, and with the last one why the answer ended."""

    text: str
    finish_reason: str = ""
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # the other outputs, flat

    def integer(self, name: str) -> int:
        """Return an output of one integer; 0 if it did not come."""
        array = self.arrays.get(name)
        return 0 if array is None else int(array[0])


class TritonServer:
    """Belongs to the event loop that made it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ready = False
        self.in_flight = 0
        self._client = triton_aio.InferenceServerClient(url, channel_args=_CHANNEL)

    async def probe(self) -> bool:
        """Ask whether the ensemble is ready, and remember it."""
        try:
            ready = bool(
                await self._client.is_model_ready(ENSEMBLE, client_timeout=_PROBE_TIMEOUT_S)
            )
        except InferenceServerException:
            ready = False
        if ready != self.ready:
            _logger.info("server %s is %s", self.url, "ready" if ready else "not ready")
            self.ready = ready
        return ready

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    async def stream(self, call: Call) -> AsyncGenerator[Piece, None]:
        """Yield the answer as it is made; closing the generator cancels the request.

        Exactly the last piece has a finish reason. Raises ServerUnavailable, ServerRefusal or
        DeadlineExceeded.
        """
        self.in_flight += 1
        responses = self._client.stream_infer(
            _one(_request(call)), stream_timeout=call.timeout_s + _DEADLINE_SLACK_S
        )
        ended = False
        refusal = ""
        try:
            # After an error, too, to the end of the stream: tritonserver 2.51 never lets go of an
            # ensemble's request that is cancelled while it is being refused.
            async for result, error in responses:
                if error is not None:
                    refusal = error.message()
                    continue
                piece = _piece(result.get_response())
                ended = ended or bool(piece.finish_reason)
                yield piece
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineExceeded from None
            self.ready = False  # until the next probe
            raise ServerUnavailable(f"{self.url}: {error.details()}") from None
        finally:
            responses.cancel()
            self.in_flight -= 1
        if refusal:
            raise ServerRefusal(refusal)
        if not ended:
            raise ServerUnavailable(f"{self.url}: the stream ended without a finish reason")


async def _one(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


def _request(call: Call) -> dict[str, Any]:
    return {
        "model_name": ENSEMBLE,
        "request_id": call.request_id,
        "inputs": [_tensor(name, value) for name, value in call.inputs.items()],
        "outputs": [triton.InferRequestedOutput(name) for name in call.outputs],
        "parameters": {"deadline_ms": int(call.timeout_s * 1000), **call.parameters},
    }


def _tensor(name: str, value: Any) -> triton.InferInput:
    dtype = _DTYPES[name]
    values = value if isinstance(value, list) else [value]
    encoded = [v.encode() if isinstance(v, str) else v for v in values]
    wire_dtype = "BYTES" if dtype == "STRING" else dtype
    tensor = triton.InferInput(name, [1, len(encoded)], wire_dtype)
    tensor.set_data_from_numpy(np.array([encoded], dtype=_NUMPY[dtype]))
    return tensor


def _piece(response: Any) -> Piece:
    text = reason = ""
    arrays: dict[str, NDArray[Any]] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.name == "text_output":
            text = raw[4:].decode()  # one string after its length
        elif output.name == "finish_reason":
            reason = raw[4:].decode()
        else:
            arrays[output.name] = np.frombuffer(raw, _READ[output.datatype])
    return Piece(text, reason, arrays)
