"""Requests in OpenAI's terms → calls of the ensemble."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from deepseek_triton.gateway.errors import bad_request, not_supported
from deepseek_triton.gateway.guide import guide_inputs
from deepseek_triton.gateway.schema import (
    MAX_TOKENS,
    ChatRequest,
    CompletionRequest,
    Content,
    Message,
    SamplingFields,
    TokenizeRequest,
)
from deepseek_triton.gateway.served_model import ServedModel
from deepseek_triton.gateway.triton import Call

_SEED_MASK = 2**64 - 1
_COUNTS = ("num_input_tokens", "num_output_tokens", "kv_cache_reused_blocks")
_LOG_PROBS = ("output_log_probs", "output_token_ids")
_TOP_LOG_PROBS = ("top_token_ids", "top_log_probs")
_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
_DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True)
class Origin:
    """Where a request comes from, and what bounds it."""

    request_id: str
    timeout_s: float


def chat_calls(request: ChatRequest, model: ServedModel, origin: Origin) -> tuple[str, list[Call]]:
    """Return the prompt and one call for each choice; raises ApiError."""
    prompt = chat_prompt(request, model)
    limit = request.max_completion_tokens
    if limit is not None and request.max_tokens not in (None, limit):
        raise bad_request("max_tokens", "max_tokens contradicts max_completion_tokens")
    limit = limit or request.max_tokens
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs", "top_logprobs: needs logprobs to be true")
    parameters: dict[str, bool | int | str] = {}
    if limit is None:
        parameters["clip_max_tokens"] = True
    inputs = {
        **_sampling(request, model),
        **guide_inputs(request, model, prompt),
        "text_input": prompt,
        "max_tokens": limit or MAX_TOKENS,
    }
    top = (request.top_logprobs or 0) if request.logprobs else None
    return prompt, _choices(request, model, origin, inputs, parameters, top, 0)


def completion_calls(
    request: CompletionRequest, model: ServedModel, origin: Origin
) -> tuple[list[str], list[Call]]:
    """Return the prompts and the calls of all choices, prompt by prompt; raises ApiError."""
    if request.echo and request.logprobs is not None:
        raise not_supported("echo", "not together with logprobs: prompts are not scored")
    prompts = _prompts(request, model)
    calls: list[Call] = []
    for prompt in prompts:
        inputs = {
            **_sampling(request, model),
            "text_input": prompt,
            "max_tokens": request.max_tokens or _DEFAULT_COMPLETION_TOKENS,
        }
        calls += _choices(request, model, origin, inputs, {}, request.logprobs, len(calls))
    return prompts, calls


def chat_prompt(request: ChatRequest | TokenizeRequest, model: ServedModel) -> str:
    """Return the conversation as the model's template renders it; raises ApiError."""
    if model.template is None:
        raise not_supported(
            "messages", "this model has no chat template; use /v1/completions with a prompt"
        )
    options = request.chat_template_kwargs or {}
    reserved = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
    for name in options:
        if name in reserved or name not in model.template.variables:
            raise bad_request(
                f"chat_template_kwargs.{name}", f"{name!r} is no option of the chat template"
            )
    tools = None
    if request.tools and not (isinstance(request, ChatRequest) and request.tool_choice == "none"):
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
    add = request.add_generation_prompt if isinstance(request, TokenizeRequest) else True
    return model.template.render(
        [_plain(message) for message in request.messages or []],
        tools=tools,
        options=options,
        add_generation_prompt=add,
    )


def _plain(message: Message) -> dict[str, Any]:
    """Return one message as templates take it: its content a text."""
    plain = message.model_dump(exclude_none=True)
    if plain["role"] == "developer":
        plain["role"] = "system"
    if plain["role"] == "assistant" and plain.get("tool_calls"):
        plain["content"] = _text(message.content) if message.content else None
    else:
        plain.pop("tool_calls", None)
        plain["content"] = _text(message.content)
    return plain


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _prompts(request: CompletionRequest, model: ServedModel) -> list[str]:
    prompt = request.prompt
    items: list[Any] = prompt if isinstance(prompt, list) else [prompt]
    if isinstance(items[0], int):
        items = [items]
    return [item if isinstance(item, str) else _text_of(item, model) for item in items]


def _text_of(token_ids: list[int], model: ServedModel) -> str:
    text = model.text_of(token_ids)
    if text is None:
        raise bad_request(
            "prompt", "prompt: these token ids are not how any text tokenizes; send the text"
        )
    return text


def _choices(
    request: SamplingFields,
    model: ServedModel,
    origin: Origin,
    inputs: dict[str, Any],
    parameters: dict[str, bool | int | str],
    top_log_probs: int | None,
    first: int,
) -> list[Call]:
    """Return one call for each of n choices; with a seed, each has its own."""
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options", "stream_options: needs stream to be true")
    outputs: tuple[str, ...] = ("text_output", "finish_reason", *_COUNTS)
    if top_log_probs is not None:
        inputs = {**inputs, "return_log_probs": True}
        parameters = {**parameters, "return_token_ids": True}
        outputs += _LOG_PROBS
        if top_log_probs:
            parameters["top_log_probs"] = top_log_probs
            outputs += _TOP_LOG_PROBS
    if request.logit_bias:
        parameters = {**parameters, "logit_bias": json.dumps(request.logit_bias)}
    check_unicode(inputs["text_input"], *inputs.get("stop_words", ()))
    affinity = request.prompt_cache_key or model.affinity(str(inputs["text_input"]))
    calls = []
    for index in range(request.n or 1):
        seed = {} if request.seed is None else {"seed": (request.seed + index) & _SEED_MASK}
        calls.append(
            Call(
                request_id=f"{origin.request_id}/{first + index}",
                inputs={**inputs, **seed},
                parameters=parameters,
                outputs=outputs,
                affinity=affinity,
                timeout_s=origin.timeout_s,
            )
        )
    return calls


def check_unicode(*texts: str) -> None:
    """Raise ApiError for a text with a lone surrogate: JSON can spell one, UTF-8 cannot."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError as error:
        character = f"U+{ord(error.object[error.start]):04X}"
        raise bad_request(None, f"a text holds {character}, half of a surrogate pair") from error


def _sampling(request: SamplingFields, model: ServedModel) -> dict[str, Any]:
    inputs: dict[str, Any] = {
        "stream": bool(request.stream),
        "exclude_input_in_output": True,
        "return_perf_metrics": True,
        "temperature": model.temperature,
        "top_p": model.top_p,
    }
    for name in _SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            inputs[name] = value
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    if stop:
        inputs["stop_words"] = stop
    if request.ignore_eos:
        inputs["end_id"] = -1
    return inputs
