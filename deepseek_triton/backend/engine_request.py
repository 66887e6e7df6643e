"""The tensors of the engine stage → a validated Request and how it wants to be answered."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from deepseek_triton.backend.extras import Extras
from deepseek_triton.backend.inputs import Inputs
from deepseek_triton.backend.opening import EngineLimits
from deepseek_triton.backend.sampling import sampling_params
from deepseek_triton.errors import InvalidRequestError, UnsupportedTensorError
from deepseek_triton.request import Guide, Request, RequestKey

_NO_EXTRAS = Extras()
_COUNT_FLAGS = ("return_num_input_tokens", "return_num_output_tokens")

# Of one request: its stop strings are compiled on the thread that serves every stream.
_MAX_STOP_STRINGS = 64
_MAX_STOP_CHARACTERS = 4096  # in all


@dataclass(frozen=True)
class ReplyOptions:
    """What the answer must look like."""

    stream: bool
    echo: bool  # begin with the prompt
    stop: tuple[str, ...]
    return_log_probs: bool
    return_counts: bool  # of input and output tokens, with each response
    return_perf_metrics: bool
    return_token_ids: bool = False


def read_request(
    inputs: Inputs,
    limits: EngineLimits,
    request_key: RequestKey,
    deadline_ns: int,
    extras: Extras = _NO_EXTRAS,
) -> tuple[Request, ReplyOptions]:
    """Validate everything that one request sent; raises InvalidRequestError naming the field."""
    inputs.check_one_prompt("input_lengths")
    inputs.check_supported()
    prompt = _prompt(inputs, limits)
    max_tokens = _max_tokens(inputs, len(prompt), limits, clip=extras.clip_max_tokens)
    sampling = dataclasses.replace(
        sampling_params(inputs, vocab_size=limits.vocab_size, max_tokens=max_tokens),
        logit_bias=extras.logit_bias,
        top_log_probs=extras.top_log_probs,
    )
    if extras.top_log_probs and "request_key" not in inputs:
        raise InvalidRequestError("top_log_probs", "reported by the ensemble alone; call that")
    end_ids = _end_ids(inputs, limits)
    stream = bool(inputs.flag("streaming"))
    exclude_input = inputs.flag("exclude_input_in_output")
    options = ReplyOptions(
        stream=stream,
        echo=not (stream if exclude_input is None else exclude_input),
        stop=_stop(inputs),
        return_log_probs=sampling.return_log_probs,
        return_counts=any(map(inputs.flag, _COUNT_FLAGS)),
        return_perf_metrics=bool(inputs.flag("return_perf_metrics")),
        return_token_ids=extras.return_token_ids,
    )
    request = Request(
        request_key=request_key,
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        end_id=end_ids[0] if end_ids else None,
        more_end_ids=end_ids[1:],
        guide=_guide(inputs, limits),
        deadline_ns=deadline_ns,
    )
    return request, options


def _prompt(inputs: Inputs, limits: EngineLimits) -> tuple[int, ...]:
    field = inputs.field("input_ids")
    ids = inputs.array("input_ids")
    if ids is None or ids.size == 0:
        raise InvalidRequestError(field, "empty; at least one token is needed")
    length = inputs.integer("input_lengths")
    if length != ids.size:
        raise InvalidRequestError(
            inputs.field("input_lengths"), f"{length}, but {field} holds {ids.size} tokens"
        )
    outside = (ids < 0) | (ids >= limits.vocab_size)
    if outside.any():
        position = int(outside.argmax())
        raise InvalidRequestError(
            field,
            f"token id {ids[position]} at position {position} is outside the vocabulary of "
            f"{limits.vocab_size} tokens",
        )
    return tuple(ids.tolist())


def _max_tokens(inputs: Inputs, num_prompt: int, limits: EngineLimits, *, clip: bool) -> int:
    field = inputs.field("request_output_len")
    max_tokens = inputs.integer("request_output_len") or 0
    if max_tokens < 1:
        raise InvalidRequestError(field, f"{max_tokens}; at least 1 is needed")
    if clip:
        room = min(limits.max_context_len, limits.kv_cache_tokens or limits.max_context_len)
        max_tokens = min(max_tokens, max(1, room - num_prompt))
    if num_prompt + max_tokens > limits.max_context_len:
        raise InvalidRequestError(
            field,
            f"a prompt of {num_prompt} tokens and {field} {max_tokens} exceed the context limit of "
            f"{limits.max_context_len} tokens; shorten the prompt or lower {field}",
        )
    return max_tokens


def _guide(inputs: Inputs, limits: EngineLimits) -> Guide | None:
    kind = next(iter(inputs.texts("guided_decoding_guide_type")), "")
    text = next(iter(inputs.texts("guided_decoding_guide")), "")
    if not kind and not text:
        return None
    if limits.guides is None:
        raise UnsupportedTensorError(
            inputs.field("guided_decoding_guide_type"), "this engine keeps to no form; leave it out"
        )
    return limits.guides.compile(kind, text)


def _end_ids(inputs: Inputs, limits: EngineLimits) -> tuple[int, ...]:
    end_id = inputs.integer("end_id")
    if end_id is None:
        return limits.end_ids
    if end_id == -1:
        return ()
    if not 0 <= end_id < limits.vocab_size:
        raise InvalidRequestError(
            inputs.field("end_id"),
            f"{end_id} is outside the vocabulary of {limits.vocab_size} tokens; -1 means none",
        )
    return (end_id,)


def _stop(inputs: Inputs) -> tuple[str, ...]:
    stop = tuple(text for text in inputs.texts("stop_words") if text)
    if stop and "request_key" not in inputs:
        raise UnsupportedTensorError(
            "stop_words", "matched on text, which this model does not make; call the ensemble"
        )
    field = inputs.field("stop_words")
    if len(stop) > _MAX_STOP_STRINGS:
        raise InvalidRequestError(
            field, f"{len(stop)} stop strings; at most {_MAX_STOP_STRINGS} are allowed"
        )
    num_characters = sum(map(len, stop))
    if num_characters > _MAX_STOP_CHARACTERS:
        raise InvalidRequestError(
            field,
            f"{num_characters} characters; at most {_MAX_STOP_CHARACTERS} in all are allowed",
        )
    return stop
