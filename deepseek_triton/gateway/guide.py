"""What binds a chat answer to a form: response_format, tool_choice, strict tools.

The form is sent to the engine as a JSON schema where that says it all, else as a grammar in
llguidance's dialect of Lark, in which a token stands as <[id]>.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from deepseek_triton.gateway.errors import bad_request, not_supported
from deepseek_triton.gateway.schema import (
    ChatRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    Tool,
)
from deepseek_triton.gateway.served_model import ServedModel
from deepseek_triton.text.guide import JSON_SCHEMA, LARK
from deepseek_triton.text.reasoning import CLOSE, begins_inside
from deepseek_triton.text.tool_calls import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
)

_ANY_TEXT = r"/(.|\n)*/"
_WHITE_SPACE = r"/[ \n]{0,4}/"
_JSON_OPTIONS = {"whitespace_pattern": r"[ \n\t]{0,16}"}


def guide_inputs(request: ChatRequest, model: ServedModel, prompt: str) -> dict[str, str]:
    """Return the guide's tensors for one request, none if it may say anything.

    Raises ApiError for what cannot be kept.
    """
    schema = _answer_schema(request)
    tools = _callable_tools(request)
    thinks = model.template is not None and model.template.reasons and begins_inside(prompt)
    if not tools and schema is None:
        return {}
    if not tools and not thinks:
        return _tensors(JSON_SCHEMA, json.dumps(schema))
    grammar = _Grammar(model)
    if tools:
        answer = grammar.calls(tools, several=request.parallel_tool_calls is not False)
        if not _must_call(request):
            answer = _or_else(request, answer, schema, grammar)
    else:
        answer = grammar.json(schema)
    return _tensors(LARK, grammar.text(answer, after_reasoning=thinks))


def _or_else(
    request: ChatRequest, calls: str, schema: dict[str, Any] | None, grammar: _Grammar
) -> str:
    """Return the rule of an answer that may call, but need not."""
    if schema is not None:
        return f"{grammar.json(schema)} | {calls}"
    if not grammar.tags_are_tokens:  # any text would cover calls, too
        param = "tools" if any(t.function.strict for t in request.tools or ()) else ""
        raise not_supported(
            param or "parallel_tool_calls",
            "this model's tags of calls are no tokens; use tool_choice 'required', or leave it out",
        )
    return f"{_ANY_TEXT} ({calls})?"


def _answer_schema(request: ChatRequest) -> dict[str, Any] | None:
    wanted = request.response_format
    if isinstance(wanted, JsonObjectFormat):
        return {"type": "object"}
    if isinstance(wanted, JsonSchemaFormat):
        return wanted.json_schema.json_schema or {}
    return None


def _must_call(request: ChatRequest) -> bool:
    return isinstance(request.tool_choice, NamedTool) or request.tool_choice == "required"


def _callable_tools(request: ChatRequest) -> Sequence[Tool]:
    """Return the tools whose calls must be kept to their form; none if none must."""
    tools, choice = request.tools or [], request.tool_choice
    if not tools and choice not in (None, "none"):
        raise bad_request("tool_choice", "tool_choice: there are no tools")
    if choice == "none":
        return []
    if isinstance(choice, NamedTool):
        chosen = [tool for tool in tools if tool.function.name == choice.function.name]
        if not chosen:
            raise bad_request(
                "tool_choice", f"tool_choice: there is no tool {choice.function.name!r}"
            )
        return chosen
    kept = (
        choice == "required"
        or request.parallel_tool_calls is False
        or any(tool.function.strict for tool in tools)
        or _answer_schema(request) is not None
    )
    return tools if kept else []


def _tensors(kind: str, text: str) -> dict[str, str]:
    return {"guided_decoding_guide_type": kind, "guided_decoding_guide": text}


class _Grammar:
    """Collects the rules of one grammar."""

    def __init__(self, model: ServedModel) -> None:
        self._tokenizer = model.tokenizer
        self._fences = model.template is None or model.template.fences_arguments
        self._rules: list[str] = []
        self.tags_are_tokens = self._tokenizer.token_id(CALLS_BEGIN) is not None

    def json(self, schema: dict[str, Any] | None) -> str:
        """Return the name of a rule for JSON that follows `schema`."""
        name = f"json{len(self._rules)}"
        options = {"x-guidance": _JSON_OPTIONS, **(schema or {})}
        self._rules.append(f"{name}: %json {json.dumps(options)}")
        return name

    def calls(self, tools: Sequence[Tool], *, several: bool) -> str:
        """Return the name of a rule for calls of `tools`, strict or not: at least one."""
        alternatives = " | ".join(self._call(tool) for tool in tools)
        one = f"{self._tag(CALL_BEGIN)} ({alternatives}) {self._tag(CALL_END)}"
        self._rules.append(f"call: {one}")
        more = r' ("\n"? call)*' if several else ""
        self._rules.append(f"calls: {self._tag(CALLS_BEGIN)} call{more} {self._tag(CALLS_END)}")
        return "calls"

    def text(self, answer: str, *, after_reasoning: bool) -> str:
        """Return the whole grammar."""
        start = f"({answer})"
        if after_reasoning:
            start = f"{_ANY_TEXT} {self._tag(CLOSE)} {_WHITE_SPACE} {start}"
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _call(self, tool: Tool) -> str:
        name = tool.function.name
        arguments = self.json(tool.function.parameters or {"type": "object"})
        separator = self._tag(SEPARATOR)
        if self._fences:
            return f'"function" {separator} "{name}\\n```json\\n" {arguments} "\\n```"'
        return f'"{name}" {separator} {arguments}'

    def _tag(self, tag: str) -> str:
        token_id = self._tokenizer.token_id(tag)
        return f'"{tag}"' if token_id is None else f"<[{token_id}]>"
