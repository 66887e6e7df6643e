"""What the end-to-end tests share: raw gRPC requests, and the server's metrics."""

from __future__ import annotations

import json
import queue
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import tritonclient.grpc as triton

from client.grpc_stream import Chunk, stream_grpc
from deepseek_triton.server import RunningServer

T = TypeVar("T")

NEVER = -1  # as end_id: the model's end token does not end the request
PROMPTS = (
    "What is deep learning?",
    " leading space and trailing space ",
    "def f(x):\n\treturn x + 1\n",
    "深度学习是什么？",
    "1234567890",
    "a",
    "🙂 naïve café",
    "The quick brown fox jumps over the lazy dog. " * 12,
)


@dataclass(frozen=True)
class Answer:
    """One request's whole answer."""

    text: str
    finish_reason: str
    chunks: tuple[Chunk, ...]

    @property
    def deltas(self) -> list[str]:
        return [chunk.text for chunk in self.chunks]


def complete(server: RunningServer, prompt: str, **options: Any) -> Answer:
    """Run one request through the ensemble with the example client."""
    chunks = tuple(stream_grpc(prompt, url=server.grpc_url, **options))
    reasons = [chunk.finish_reason for chunk in chunks if chunk.finish_reason]
    assert len(reasons) == 1, f"finish reasons {reasons}"
    assert chunks[-1].finish_reason, "the finish reason is not in the last response"
    return Answer("".join(chunk.text for chunk in chunks), reasons[0], chunks)


def concurrently(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run `calls` at the same time, each in a thread; return their results in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@dataclass
class RawAnswer:
    """All that came back on a stream for one request."""

    results: list[Any] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    finals: int = 0

    @property
    def error(self) -> str:
        """The message of the one error."""
        assert len(self.errors) == 1, f"errors {self.errors}, {len(self.results)} results"
        return str(self.errors[0].message())

    def arrays(self, name: str) -> list[np.ndarray]:
        """The output `name` of each response that has one."""
        found = (result.as_numpy(name) for result in self.results)
        return [array for array in found if array is not None]


def raw_request(
    server: RunningServer,
    inputs: Sequence[triton.InferInput],
    *,
    model: str = "ensemble",
    outputs: Sequence[str] | None = None,
    settle_s: float = 0.2,
    timeout_s: float = 60.0,
) -> RawAnswer:
    """Send one request and collect all of its answer, waiting a while for what should not come."""
    arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    answer = RawAnswer()
    wanted = None if outputs is None else [triton.InferRequestedOutput(name) for name in outputs]
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        client.async_stream_infer(model, inputs, outputs=wanted, enable_empty_final_response=True)
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                result, error = arrived.get(timeout=left)
            except queue.Empty:
                break
            if error is not None:
                answer.errors.append(error)
            else:
                response = result.get_response()
                answer.finals += response.parameters["triton_final_response"].bool_param
                if response.outputs:
                    answer.results.append(result)
            if answer.errors or answer.finals == 1:
                deadline = min(deadline, time.monotonic() + settle_s)
        client.stop_stream(cancel_requests=not (answer.errors or answer.finals))
    return answer


def tensor(name: str, dtype: str, values: Any, shape: Sequence[int] | None = None) -> Any:
    """Return an input of any name, dtype and shape; the shape is [1, n] unless given."""
    numpy_dtypes: Mapping[str, Any] = {
        "BYTES": np.object_,
        "BOOL": np.bool_,
        "FP16": np.float16,
        "FP32": np.float32,
        "INT32": np.int32,
        "INT64": np.int64,
        "UINT64": np.uint64,
    }
    array = np.array(values, dtype=numpy_dtypes[dtype])
    array = array.reshape(shape if shape is not None else (1, -1))
    result = triton.InferInput(name, list(array.shape), dtype)
    result.set_data_from_numpy(array)
    return result


def engine_request(
    server: RunningServer,
    ids: Sequence[int],
    max_tokens: int,
    *extra: Any,
    outputs: Sequence[str] = ("output_ids", "sequence_length"),
    streaming: bool = False,
) -> RawAnswer:
    """Send token ids to the engine stage itself, as a client of upstream's tensors does."""
    inputs = [
        tensor("input_ids", "INT32", ids),
        tensor("input_lengths", "INT32", [len(ids)]),
        tensor("request_output_len", "INT32", [max_tokens]),
        tensor("streaming", "BOOL", [streaming]),
        *extra,
    ]
    return raw_request(server, inputs, model="tensorrt_llm", outputs=outputs)


def refusal(
    server: RunningServer, tensors: Mapping[str, tuple[str, Any]], *, model: str = "ensemble"
) -> str:
    """Return the message with which a request is refused, the same over gRPC and HTTP.

    `tensors` are dtypes and values by name; values are scalars or lists. Over HTTP, streamed and
    not, the status has to be 400; a gRPC stream carries no status.
    """
    lists = {n: v if isinstance(v, list) else [v] for n, (_, v) in tensors.items()}
    inputs = [tensor(name, dtype, lists[name]) for name, (dtype, _) in tensors.items()]
    message = raw_request(server, inputs, model=model).error
    body = json.dumps({name: value for name, (_, value) in tensors.items()}).encode()
    for verb in ("generate", "generate_stream"):
        url = f"http://{server.http_url}/v2/models/{model}/{verb}"
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(url, body), timeout=30.0).read()
        answer = caught.value.read().decode().removeprefix("data: ")
        assert (caught.value.code, json.loads(answer)) == (400, {"error": message})
    return message.removeprefix("in ensemble 'ensemble', ")


def metrics(server: RunningServer) -> dict[str, float]:
    """Return the engine's metrics, by name and labels without the common prefix."""
    with urllib.request.urlopen(server.metrics_url, timeout=10.0) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for name, labels, value in re.findall(
        r"^deepseek_triton_(\w+)(\{[^}]*\})? (\S+)$", text, re.MULTILINE
    ):
        label = re.search(r'(?:reason|stage)="(\w+)"', labels)
        found[f"{name}.{label[1]}" if label else name] = float(value)
    return found


def is_idle(server: RunningServer) -> bool:
    now = metrics(server)
    return not (now["requests_active"] or now["requests_waiting"] or now["kv_blocks_used"])


def settled(server: RunningServer) -> dict[str, float]:
    """Return the engine's metrics once what came before is in them.

    The server is told of them a few times a second; a test that counts has to begin with all
    that earlier requests did, and ends with the same call or waits for the value it expects.
    """
    last, since = metrics(server), time.monotonic()
    start = since
    while time.monotonic() - since < 0.5:
        assert time.monotonic() - start < 30.0, "the metrics do not come to rest"
        time.sleep(0.05)
        if (now := metrics(server)) != last:
            last, since = now, time.monotonic()
    return last


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Poll until `condition` holds; return how long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"not after {seconds} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - start


def processes_serving(engine_dir: Path) -> list[int]:
    """Return running processes that were started to serve `engine_dir`."""
    marker = f"DEEPSEEK_TRITON_ENGINE_DIR={engine_dir}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if marker in variables:
            found.append(int(folder.name))
    return found
