"""Forms of answers: each grammar is compiled, and followed by a text that fits and one that not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from deepseek_triton.gateway.errors import ApiError
from deepseek_triton.gateway.guide import guide_inputs
from deepseek_triton.gateway.schema import ChatRequest
from deepseek_triton.text.chat_template import ChatTemplate
from deepseek_triton.text.guide import GuideCompiler
from deepseek_triton.text.tool_calls import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
)
from tests.unit.gateway.fakes import FOLDER, MODEL

TOKENIZER = MODEL.tokenizer
END = TOKENIZER.eos_token_id or 0
COMPILER = GuideCompiler(FOLDER / "tokenizer.json", TOKENIZER.vocab_size, [END])
THINKS = "…<｜Assistant｜><think>\n"
ANSWERS = "…<｜Assistant｜></think>"
V3 = replace(MODEL, template=ChatTemplate("{{ tools }} ```json </think>", {}))
OBJECT = {"type": "json_object"}


def tool(name: str, **function: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, **function}}


def request(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "Hi"}]
    return ChatRequest.model_validate({"model": "m", "messages": messages, **fields})


def fits(inputs: dict[str, str], text: str) -> bool:
    """Whether a whole answer may be `text`."""
    kind, guide = inputs["guided_decoding_guide_type"], inputs["guided_decoding_guide"]
    state = COMPILER.compile(kind, guide).start()
    for token_id in TOKENIZER.encode(text)[1:]:
        if state.accept(token_id):
            return False
    return state.is_complete or bool(state.allowed()[END // 32] >> END % 32 & 1)


def v31(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}"


def v3(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


def test_nothing_is_bound_unless_asked_for() -> None:
    for fields in ({}, {"tools": [tool("f")]}, {"response_format": {"type": "text"}}):
        assert guide_inputs(request(**fields), MODEL, ANSWERS) == {}
    assert guide_inputs(request(tools=[tool("f")], tool_choice="none"), MODEL, ANSWERS) == {}


def test_json_is_bound_to_its_schema() -> None:
    inputs = guide_inputs(request(response_format=OBJECT), MODEL, ANSWERS)
    assert inputs["guided_decoding_guide_type"] == "json_schema"
    assert fits(inputs, '{"a": [1, "x"]}')
    assert not fits(inputs, "[1]")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
    inputs = guide_inputs(request(response_format=schema), MODEL, ANSWERS)
    assert fits(inputs, '"b"') and not fits(inputs, '"c"')


def test_json_is_bound_after_reasoning_only() -> None:
    inputs = guide_inputs(request(response_format=OBJECT), MODEL, THINKS)
    assert fits(inputs, 'I say {"x" first.</think>\n\n{"a": 1}')
    assert not fits(inputs, '{"a": 1}'), "the reasoning has no end"
    assert not fits(inputs, "So</think>no")


@pytest.mark.parametrize(("model", "form"), [(MODEL, v31), (V3, v3)], ids=["V3.1", "V3"])
def test_calls_that_must_come_are_bound_to_their_form(model: Any, form: Any) -> None:
    tools = [tool("f"), tool("g")]
    inputs = guide_inputs(request(tools=tools, tool_choice="required"), model, ANSWERS)
    good = form("f", '{"a": 1}'), form("g", '{"a": 2}')
    assert fits(inputs, f"{CALLS_BEGIN}{good[0]}{CALLS_END}")
    assert fits(inputs, f"{CALLS_BEGIN}{good[0]}\n{good[1]}{CALLS_END}")
    assert not fits(inputs, f"{CALLS_BEGIN}{CALLS_END}")
    assert not fits(inputs, "no")
    wrong_arguments, wrong_name = form("f", '{"b": 1}'), form("h", '{"a": 1}')
    assert not fits(inputs, f"{CALLS_BEGIN}{wrong_arguments}{CALLS_END}")
    assert not fits(inputs, f"{CALLS_BEGIN}{wrong_name}{CALLS_END}")

    named = {"type": "function", "function": {"name": "g"}}
    one = request(tools=tools, tool_choice=named, parallel_tool_calls=False)
    inputs = guide_inputs(one, model, THINKS)
    assert fits(inputs, f"Hm</think>{CALLS_BEGIN}{good[1]}{CALLS_END}")
    assert not fits(inputs, f"Hm</think>{CALLS_BEGIN}{good[0]}{CALLS_END}")
    assert not fits(inputs, f"Hm</think>{CALLS_BEGIN}{good[1]}{good[1]}{CALLS_END}")


def test_json_or_calls() -> None:
    asked = request(tools=[tool("f")], response_format=OBJECT)
    inputs = guide_inputs(asked, MODEL, ANSWERS)
    call = v31("f", '{"a": 1}')
    assert fits(inputs, '{"x": 1}')
    assert fits(inputs, f"{CALLS_BEGIN}{call}{CALLS_END}")
    assert not fits(inputs, "text")


def test_strict_tools_that_need_not_be_called_need_tags_that_are_tokens() -> None:
    strict = request(tools=[tool("f", strict=True)])
    with pytest.raises(ApiError) as caught:
        guide_inputs(strict, MODEL, ANSWERS)
    assert caught.value.param == "tools"

    class WithTags:
        """Stands for a tokenizer in which the tags are tokens; one that exists plays their part."""

        def token_id(self, text: str) -> int | None:
            return TOKENIZER.token_id("<｜User｜>")

    with_tags: Any = replace(MODEL, tokenizer=WithTags())  # type: ignore[arg-type]
    inputs = guide_inputs(strict, with_tags, ANSWERS)
    tag = "<｜User｜>"
    assert fits(inputs, "just text")
    assert fits(inputs, f'text{tag}{tag}f{tag}{{"a": 1}}{tag}{tag}')
    assert not fits(inputs, f'text{tag}{tag}f{tag}{{"b": 1}}{tag}{tag}')


def test_a_tool_that_is_not_there_cannot_be_called() -> None:
    for fields in (
        {"tool_choice": "required"},
        {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    ):
        with pytest.raises(ApiError) as caught:
            guide_inputs(request(**fields), MODEL, ANSWERS)
        assert caught.value.param == "tool_choice"


def test_schemas_keep_their_own_options() -> None:
    inputs = guide_inputs(request(tools=[tool("f")], tool_choice="required"), MODEL, ANSWERS)
    assert json.dumps(tool("f")["function"]["parameters"])[1:-1] in inputs["guided_decoding_guide"]
