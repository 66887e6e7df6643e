"""Stand-ins for Triton's Python backend and for the engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from deepseek_triton.backend.pb import Pb
from deepseek_triton.metrics import EngineStats
from deepseek_triton.request import FinishReason, Request, TokenOutput
from deepseek_triton.text.tokenizer import Tokenizer

FINAL = 1
TOKENIZER = Tokenizer.load(Path(str(resources.files("deepseek_triton.checkpoint") / "data")))


class FakeTensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        assert isinstance(array, np.ndarray)
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class FakeError:
    INTERNAL, INVALID_ARG, CANCELLED, UNAVAILABLE = (
        "INTERNAL",
        "INVALID_ARG",
        "CANCELLED",
        "UNAVAILABLE",
    )

    def __init__(self, message: str, code: str) -> None:
        self.message, self.code = message, code


class FakeResponse:
    def __init__(self, tensors: list[FakeTensor], error: FakeError | None = None) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in tensors}
        self.error = error

    @property
    def text(self) -> str:
        return self.tensors["OUTPUT"].reshape(-1)[0].decode()

    @property
    def finish_reason(self) -> str:
        return self.tensors["finish_reason"].reshape(-1)[0].decode()


class FakeMetricFamily:
    COUNTER, GAUGE = "counter", "gauge"

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name, self.kind, self.samples = name, kind, {}

    def Metric(self, labels: dict[str, str]) -> Any:  # noqa: N802, Triton's name
        key = tuple(labels.items())
        family = self

        class Sample:
            def increment(self, by: float) -> None:
                assert family.kind == "counter" and by > 0
                family.samples[key] += by

            def set(self, value: float) -> None:
                assert family.kind == "gauge"
                family.samples[key] = value

        assert key not in self.samples, "one sample for each label set"
        self.samples[key] = 0.0
        return Sample()


class FakeUtils:
    """Stands for the module triton_python_backend_utils."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    Tensor = FakeTensor
    InferenceResponse = FakeResponse
    TritonError = FakeError

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, np.ndarray]]] = []
        self.call_parameters: list[dict[str, str]] = []
        self.families: dict[str, FakeMetricFamily] = {}
        self.call_error: Exception | None = None

    def InferenceRequest(self, *, model_name, requested_output_names, inputs, parameters) -> Any:  # noqa: N802
        def execute(*, decoupled: bool) -> list[Any]:
            assert decoupled
            if self.call_error is not None:
                raise self.call_error
            self.call_parameters.append(parameters)
            self.calls.append((model_name, {t.name(): t.as_numpy() for t in inputs}))
            return []

        return SimpleNamespace(exec=execute)

    @property
    def MetricFamily(self) -> Any:  # noqa: N802
        def make(name: str, description: str, kind: str) -> FakeMetricFamily:
            self.families[name] = FakeMetricFamily(name, description, kind)
            return self.families[name]

        make.COUNTER, make.GAUGE = "counter", "gauge"
        return make

    @property
    def aborted(self) -> list[str]:
        assert all(model == "tensorrt_llm" and t["stop"].all() for model, t in self.calls)
        return [tensors["request_key"][0, 0].decode() for _, tensors in self.calls]


class FakeSender:
    def __init__(self) -> None:
        self.responses: list[FakeResponse] = []
        self.finals = 0
        self.cancelled = False
        self.polls = 0
        self.failure: Exception | None = None

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        assert not self.finals, "nothing may follow the final flag"
        if self.failure is not None:
            raise self.failure
        if response is not None:
            self.responses.append(response)
        self.finals += flags == FINAL

    def is_cancelled(self) -> bool:
        self.polls += 1
        return self.cancelled

    @property
    def error(self) -> FakeError:
        (error,) = [r.error for r in self.responses if r.error is not None]
        return error


class FakeRequest:
    def __init__(
        self,
        tensors: dict[str, np.ndarray],
        *,
        request_id: str = "",
        parameters: dict[str, Any] | None = None,
        wanted: set[str] | None = None,
        cancelled: bool = False,
    ) -> None:
        self._tensors = tensors
        self._id = request_id
        self._parameters = json.dumps(parameters or {})
        self._wanted = wanted
        self.cancelled = cancelled
        self.cancel_polls = 0
        self.sender = FakeSender()

    def inputs(self) -> list[FakeTensor]:
        return [FakeTensor(name, array) for name, array in self._tensors.items()]

    def request_id(self) -> str:
        return self._id

    def parameters(self) -> str:
        return self._parameters

    def requested_output_names(self) -> set[str]:
        return Everything() if self._wanted is None else self._wanted

    def is_cancelled(self) -> bool:
        self.cancel_polls += 1
        return self.cancelled

    def get_response_sender(self) -> FakeSender:
        return self.sender


class Everything(set):
    def __contains__(self, name: object) -> bool:
        return True


@dataclass
class FakeEngine:
    """Takes requests; tests make its outputs by hand."""

    requests: dict[str, Request] = field(default_factory=dict)
    emits: dict[str, Any] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    abort_reasons: list[FinishReason] = field(default_factory=list)
    refusal: Exception | None = None
    closed: bool = False
    is_alive: bool = True

    def submit(self, request: Request, emit: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.requests[request.request_key] = request
        self.emits[request.request_key] = emit

    def abort(self, request_key: str, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        self.aborted.append(request_key)
        self.abort_reasons.append(reason)
        return request_key in self.requests

    def stats(self) -> EngineStats:
        return EngineStats(requests_active=len(self.requests), kv_blocks_total=8)

    def close(self) -> None:
        self.closed = True

    @property
    def request(self) -> Request:
        (request,) = self.requests.values()
        return request

    def emit(self, output: TokenOutput) -> None:
        self.emits[output.request_key](output)


def output(
    key: str = "k",
    index: int = 0,
    token_ids: tuple[int, ...] = (),
    finish_reason: FinishReason | None = None,
    **others: Any,
) -> TokenOutput:
    values = {
        "log_probs": (),
        "cum_log_prob": 0.0,
        "num_input_tokens": 2,
        "num_output_tokens": len(token_ids),
        **others,
    }
    return TokenOutput(key, index, token_ids, finish_reason=finish_reason, **values)


def column(dtype: Any, *values: Any) -> np.ndarray:
    """A tensor [1, n]."""
    encoded = [v.encode() if isinstance(v, str) else v for v in values]
    return np.array([encoded], dtype)


def fake_pb() -> tuple[Pb, FakeUtils]:
    utils = FakeUtils()
    return Pb(utils), utils
