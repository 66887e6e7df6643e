#!/usr/bin/env python3
"""Stream a completion over gRPC. Copy this file: it needs tritonclient[grpc] alone.

python client/grpc_stream.py --prompt "What is deep learning?" --max-tokens 32

From code, `for chunk in stream_grpc("Hello", max_tokens=32): print(chunk.text, end="")`. Closing
the generator (or leaving the loop) cancels the request on the server.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

# Input tensors of the ensemble. Each has shape [1, n]: one prompt, n values.
DTYPES: dict[str, tuple[str, Any]] = {
    "text_input": ("BYTES", np.object_),
    "max_tokens": ("INT32", np.int32),
    "min_tokens": ("INT32", np.int32),
    "stream": ("BOOL", np.bool_),
    "temperature": ("FP32", np.float32),
    "top_k": ("INT32", np.int32),
    "top_p": ("FP32", np.float32),
    "repetition_penalty": ("FP32", np.float32),
    "presence_penalty": ("FP32", np.float32),
    "frequency_penalty": ("FP32", np.float32),
    "seed": ("UINT64", np.uint64),
    "stop_words": ("BYTES", np.object_),
    "guided_decoding_guide_type": ("BYTES", np.object_),
    "guided_decoding_guide": ("BYTES", np.object_),
    "end_id": ("INT32", np.int32),
    "exclude_input_in_output": ("BOOL", np.bool_),
    "return_log_probs": ("BOOL", np.bool_),
    "return_num_input_tokens": ("BOOL", np.bool_),
    "return_num_output_tokens": ("BOOL", np.bool_),
}


class GenerationError(Exception):
    """The server's answer to a request that failed, or why there is none.

    `status` is that of the stream (deadline, no connection); an error of the request itself comes
    as a message alone. The header triton_grpc_error would add a status, but tritonserver 2.51
    crashes on it when a request fails while others run.
    """

    def __init__(self, message: str, status: str | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Chunk:
    """One response: the text that it adds, and "" until the last one says why it ended."""

    text: str
    finish_reason: str = ""
    outputs: Mapping[str, np.ndarray] = field(default_factory=dict)


def stream_grpc(
    prompt: str,
    *,
    url: str = "localhost:8001",
    model: str = "ensemble",
    max_tokens: int = 64,
    stream: bool = True,
    outputs: Sequence[str] = ("text_output", "finish_reason"),
    timeout_s: float | None = None,
    parameters: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> Iterator[Chunk]:
    """Yield the completion of `prompt` as it is made.

    `sampling` takes the other names of DTYPES; None leaves a tensor out. `timeout_s` is the gRPC
    deadline: past it the server gives the request up. Raises GenerationError with the server's
    message.
    """
    values = {"text_input": prompt, "max_tokens": max_tokens, "stream": stream, **sampling}
    inputs = [make_input(name, value) for name, value in values.items() if value is not None]
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client = triton.InferenceServerClient(url)
    ended = False
    try:
        client.start_stream(
            lambda result, error: answers.put((result, error)),
            stream_timeout=timeout_s,
        )
        with contextlib.suppress(InferenceServerException):  # its reason is among the answers
            client.async_stream_infer(
                model,
                inputs,
                outputs=[triton.InferRequestedOutput(name) for name in outputs],
                enable_empty_final_response=True,
                parameters=dict(parameters or {}),
            )
        yield from _chunks(answers, url, outputs)
        ended = True
    except GenerationError:
        ended = True
        raise
    finally:
        client.stop_stream(cancel_requests=not ended)
        client.close()


def make_input(name: str, value: Any) -> triton.InferInput:
    """Return the tensor `name` [1, n] that holds `value`, a scalar or a sequence of n scalars."""
    if name not in DTYPES:
        raise TypeError(f"{name!r} is not an input; there are {', '.join(DTYPES)}")
    triton_dtype, dtype = DTYPES[name]
    values = list(value) if isinstance(value, list | tuple | np.ndarray) else [value]
    encoded = [v.encode() if isinstance(v, str) else v for v in values]
    tensor = triton.InferInput(name, [1, len(encoded)], triton_dtype)
    tensor.set_data_from_numpy(np.array([encoded], dtype=dtype))
    return tensor


def _chunks(
    answers: queue.SimpleQueue[tuple[Any, Any]], url: str, outputs: Sequence[str]
) -> Iterator[Chunk]:
    final = False
    while not final:
        result, error = answers.get()
        if error is not None:
            raise _failure(error, url) from error
        response = result.get_response()
        final = response.parameters["triton_final_response"].bool_param
        if response.outputs:
            yield _chunk({name: result.as_numpy(name) for name in outputs})


def _chunk(arrays: Mapping[str, np.ndarray | None]) -> Chunk:
    present = {name: array for name, array in arrays.items() if array is not None}
    return Chunk(_text(present, "text_output"), _text(present, "finish_reason"), present)


def _text(arrays: Mapping[str, np.ndarray], name: str) -> str:
    return b"".join(arrays[name].reshape(-1)).decode() if name in arrays else ""


def _failure(error: Any, url: str) -> GenerationError:
    status = error.status()
    if status == "StatusCode.UNAVAILABLE" and "connect" in error.message().lower():
        return GenerationError(
            f"no server at {url}: {error.message()}; start it: make serve", status
        )
    return GenerationError(error.message(), status)


def main() -> int:
    """Print the completion as it arrives; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="localhost:8001", help="host:port (default: %(default)s)")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, help="0 (the default) takes the likeliest")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--seed", type=int, help="the same seed gives the same text")
    parser.add_argument("--stop", action="append", help="end before this text; may be repeated")
    parser.add_argument("--timeout", type=float, dest="timeout_s", help="in seconds")
    arguments = vars(parser.parse_args())
    prompt, stop = arguments.pop("prompt"), arguments.pop("stop")
    try:
        for chunk in stream_grpc(prompt, stop_words=stop, **arguments):
            print(chunk.text, end="", flush=True)
    except GenerationError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
