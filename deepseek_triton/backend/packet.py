"""What the engine stage tells postprocessing about a request's output, beside the token ids.

An ensemble hands a step nothing but tensors of one earlier step once responses stream, so all that
postprocessing must know travels in one small tensor with each response: a JSON object.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.backend.flow import Mark
from deepseek_triton.errors import TRITON_STATUS
from deepseek_triton.request import FinishReason, RequestStats, TopLogProbs

_T = TypeVar("_T")

_MAX_NUMBER = (1 << 63) - 1
_STATUSES = {"", *TRITON_STATUS.values()}


@dataclass(frozen=True)
class TextOptions:
    """What a client wants of its text; sent with a request's first packet."""

    stream: bool
    stop: tuple[str, ...] = ()
    echo_ids: tuple[int, ...] = ()  # the prompt, if the text must begin with it
    num_input_tokens: int = 0
    return_log_probs: bool = False
    return_counts: bool = False
    return_token_ids: bool = False
    top_log_probs: int = 0


@dataclass(frozen=True)
class StepPacket:
    """One response of the engine stage. `index` counts a request's packets from 0 without gaps.

    A packet without tokens and finish reason lets postprocessing look whether the client is gone.
    """

    request_key: str
    index: int
    options: TextOptions | None = None  # with index 0
    log_probs: tuple[float, ...] = ()  # one per token, if asked for
    top_log_probs: tuple[TopLogProbs, ...] = ()  # one per token, if asked for
    finish_reason: FinishReason | None = None
    error: str = ""  # message, with FinishReason.ERROR
    error_status: str = ""  # name of a pb_utils.TritonError constant
    stats: RequestStats | None = None  # if asked for
    flow: Mark | None = None

    def to_tensor(self) -> NDArray[np.uint8]:
        """Return the packet as UINT8 [1, n]."""
        content: dict[str, object] = {"key": self.request_key, "index": self.index}
        if self.options is not None:
            content["options"] = dataclasses.asdict(self.options)
        if self.log_probs:
            content["log_probs"] = self.log_probs
        if self.top_log_probs:
            content["top_log_probs"] = self.top_log_probs
        if self.finish_reason is not None:
            content["finish_reason"] = self.finish_reason.value
        if self.error:
            content["error"] = (self.error, self.error_status)
        if self.stats is not None:
            content["stats"] = vars(self.stats)
        if self.flow is not None:
            content["flow"] = self.flow
        return np.frombuffer(json.dumps(content).encode(), np.uint8)[np.newaxis]

    @classmethod
    def from_tensor(cls, tensor: NDArray[np.uint8]) -> StepPacket:
        """Read what `to_tensor` wrote. Raises ValueError, KeyError or TypeError for all else."""
        try:
            content = _typed(dict, json.loads(tensor.tobytes()))
        except RecursionError:
            raise ValueError("nested too deep") from None
        options, stats = content.get("options"), content.get("stats")
        reason, flow = content.get("finish_reason"), content.get("flow")
        error, status = _typed_list(str, content.get("error", ["", ""]))
        if status not in _STATUSES:
            raise ValueError(f"{status!r} in place of a status")
        return cls(
            request_key=_typed(str, content["key"]),
            index=_typed(int, content["index"]),
            options=None if options is None else _text_options(_typed(dict, options)),
            log_probs=_typed_list(float, content.get("log_probs", [])),
            top_log_probs=tuple(map(_top, _typed(list, content.get("top_log_probs", [])))),
            finish_reason=None if reason is None else FinishReason(_typed(str, reason)),
            error=error,
            error_status=status,
            stats=None if stats is None else _request_stats(_typed(dict, stats)),
            flow=None if flow is None else _mark(flow),
        )


def _text_options(content: dict[str, Any]) -> TextOptions:
    return TextOptions(
        stream=_typed(bool, content["stream"]),
        stop=_typed_list(str, content["stop"]),
        echo_ids=_typed_list(int, content["echo_ids"]),
        num_input_tokens=_typed(int, content["num_input_tokens"]),
        return_log_probs=_typed(bool, content["return_log_probs"]),
        return_counts=_typed(bool, content["return_counts"]),
        return_token_ids=_typed(bool, content["return_token_ids"]),
        top_log_probs=_typed(int, content["top_log_probs"]),
    )


def _top(content: object) -> TopLogProbs:
    pairs = (_typed(list, pair) for pair in _typed(list, content))
    return tuple((_typed(int, token_id), _typed(float, value)) for token_id, value in pairs)


def _mark(content: object) -> Mark:
    pid, descriptor, number = _typed_list(int, content)
    if min(pid, descriptor, number) < 0 or number > _MAX_NUMBER:
        raise ValueError(f"{content} in place of a mark")
    return pid, descriptor, number


def _request_stats(content: dict[str, Any]) -> RequestStats:
    return RequestStats(**{name: _typed(int, value) for name, value in content.items()})


def _typed(kind: type[_T], value: object) -> _T:
    if type(value) is not kind:  # isinstance would take true for an integer
        raise TypeError(f"{type(value).__name__} in place of {kind.__name__}")
    return value


def _typed_list(kind: type[_T], value: object) -> tuple[_T, ...]:
    return tuple(_typed(kind, item) for item in _typed(list, value))
