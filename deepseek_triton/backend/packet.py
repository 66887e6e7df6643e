"""What the engine stage tells postprocessing about a request's output, beside the token ids.

An ensemble hands a step nothing but tensors of one earlier step once responses stream, so all that
postprocessing must know travels in one small tensor with each response: a JSON object.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.request import FinishReason, RequestStats


@dataclass(frozen=True)
class TextOptions:
    """What a client wants of its text; sent with a request's first packet."""

    stream: bool
    stop: tuple[str, ...] = ()
    echo_ids: tuple[int, ...] = ()  # the prompt, if the text must begin with it
    num_input_tokens: int = 0
    return_log_probs: bool = False
    return_counts: bool = False


@dataclass(frozen=True)
class StepPacket:
    """One response of the engine stage. `index` counts a request's packets from 0 without gaps.

    A packet without tokens and finish reason lets postprocessing look whether the client is gone.
    """

    request_key: str
    index: int
    options: TextOptions | None = None  # with index 0
    log_probs: tuple[float, ...] = ()  # one per token, if asked for
    finish_reason: FinishReason | None = None
    error: str = ""  # message, with FinishReason.ERROR
    error_status: str = ""  # name of a pb_utils.TritonError constant
    stats: RequestStats | None = None  # if asked for

    def to_tensor(self) -> NDArray[np.uint8]:
        """Return the packet as UINT8 [1, n]."""
        content: dict[str, object] = {"key": self.request_key, "index": self.index}
        if self.options is not None:
            content["options"] = dataclasses.asdict(self.options)
        if self.log_probs:
            content["log_probs"] = self.log_probs
        if self.finish_reason is not None:
            content["finish_reason"] = self.finish_reason.value
        if self.error:
            content["error"] = (self.error, self.error_status)
        if self.stats is not None:
            content["stats"] = dataclasses.asdict(self.stats)
        return np.frombuffer(json.dumps(content).encode(), np.uint8)[np.newaxis]

    @classmethod
    def from_tensor(cls, tensor: NDArray[np.uint8]) -> StepPacket:
        """Read what `to_tensor` wrote. Raises ValueError, KeyError or TypeError for all else."""
        content = json.loads(tensor.tobytes())
        if not isinstance(content, dict):
            raise TypeError(f"{type(content).__name__} in place of an object")
        options = content.get("options")
        if options is not None:
            tuples = {k: tuple(v) for k, v in options.items() if isinstance(v, list)}
            options = TextOptions(**{**options, **tuples})
        reason = content.get("finish_reason")
        error, status = content.get("error", ("", ""))
        stats = content.get("stats")
        return cls(
            request_key=content["key"],
            index=content["index"],
            options=options,
            log_probs=tuple(content.get("log_probs", ())),
            finish_reason=None if reason is None else FinishReason(reason),
            error=error,
            error_status=status,
            stats=None if stats is None else RequestStats(**stats),
        )
