"""Sampling tensors of the engine stage → SamplingParams. What each value means is decided here."""

from __future__ import annotations

import numpy as np

from deepseek_triton.backend.inputs import Inputs
from deepseek_triton.errors import InvalidRequestError
from deepseek_triton.request import SamplingParams

MIN_TEMPERATURE = 1e-5
"""Below it logits / temperature overflow in single precision; such a request is greedy."""

# Beyond them scaled logits overflow. Clients send single precision, in which 0.01 is a bit less.
_MIN_REPETITION_PENALTY = float(np.float32(0.01))
_MAX_REPETITION_PENALTY = 100.0
_MAX_PENALTY = 2.0  # of presence and frequency, as OpenAI's API bounds them


def sampling_params(inputs: Inputs, *, vocab_size: int, max_tokens: int) -> SamplingParams:
    """Read how the next token is chosen; raises InvalidRequestError naming the field.

    A request that sends none of temperature, top_k and top_p is greedy. One that sends a top_k or
    top_p alone samples at temperature 1.
    """
    temperature = inputs.number("temperature")
    top_k = inputs.integer("runtime_top_k")
    top_p = inputs.number("runtime_top_p")
    if temperature is None:
        temperature = 0.0 if top_k is None and top_p is None else 1.0
    if temperature < 0:
        raise InvalidRequestError(
            inputs.field("temperature"),
            f"{temperature:g} is negative; 0 chooses the likeliest token",
        )
    return SamplingParams(
        temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
        top_k=_top_k(inputs, top_k, vocab_size),
        top_p=_top_p(inputs, top_p),
        repetition_penalty=_repetition_penalty(inputs),
        presence_penalty=_penalty(inputs, "presence_penalty"),
        frequency_penalty=_penalty(inputs, "frequency_penalty"),
        min_tokens=_min_tokens(inputs, max_tokens),
        seed=inputs.either("seed", "random_seed"),
        return_log_probs=bool(inputs.flag("return_log_probs")),
    )


def _top_k(inputs: Inputs, top_k: int | None, vocab_size: int) -> int:
    if top_k is None or top_k == -1 or top_k >= vocab_size:
        return 0
    if top_k < -1:
        raise InvalidRequestError(
            inputs.field("runtime_top_k"), f"{top_k} is not allowed; 0 or -1 keep all tokens"
        )
    return top_k


def _top_p(inputs: Inputs, top_p: float | None) -> float:
    if top_p is None:
        return 1.0
    if not 0.0 <= top_p <= 1.0:
        raise InvalidRequestError(
            inputs.field("runtime_top_p"), f"{top_p:g} is not allowed; it must be from 0 to 1"
        )
    return top_p


def _repetition_penalty(inputs: Inputs) -> float:
    penalty = inputs.number("repetition_penalty")
    if penalty is None:
        return 1.0
    if not _MIN_REPETITION_PENALTY <= penalty <= _MAX_REPETITION_PENALTY:
        raise InvalidRequestError(
            inputs.field("repetition_penalty"),
            f"{penalty:g} is not allowed; it must be from {_MIN_REPETITION_PENALTY:g} to "
            f"{_MAX_REPETITION_PENALTY:g}, and 1 means none",
        )
    return penalty


def _penalty(inputs: Inputs, name: str) -> float:
    penalty = inputs.number(name)
    if penalty is None:
        return 0.0
    if abs(penalty) > _MAX_PENALTY:
        raise InvalidRequestError(
            inputs.field(name),
            f"{penalty:g} is not allowed; it must be from {-_MAX_PENALTY:g} to {_MAX_PENALTY:g}",
        )
    return penalty


def _min_tokens(inputs: Inputs, max_tokens: int) -> int:
    min_tokens = inputs.either("min_tokens", "min_length")
    if min_tokens is None:
        return 0
    field = inputs.field("min_tokens" if "min_tokens" in inputs else "min_length")
    if min_tokens < 0:
        raise InvalidRequestError(field, f"{min_tokens} is negative")
    if min_tokens > max_tokens:
        limit = inputs.field("request_output_len")
        raise InvalidRequestError(
            field, f"{min_tokens} is more than {limit}, which is {max_tokens}"
        )
    return min_tokens
