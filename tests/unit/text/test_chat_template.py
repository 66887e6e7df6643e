from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepseek_triton.errors import InvalidRequestError, TokenizerError
from deepseek_triton.text.chat_template import ChatTemplate
from deepseek_triton.text.tool_calls import CALLS_BEGIN

BOS = "<｜begin▁of▁sentence｜>"
SPECIAL = {"bos_token": BOS, "eos_token": "<｜end▁of▁sentence｜>"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
# In the manner of DeepSeek's: namespaces, loop controls, white space control, a thinking switch.
TEMPLATE = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}
{%- endif %}{% set ns = namespace(system='', first=true) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- set ns.system = ns.system + message['content'] %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- if tools %}{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% continue %}{% endif %}
    {%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% endif %}
    {%- if message['role'] == 'assistant' %}
        {%- if message['tool_calls'] is defined and message['tool_calls'] is not none %}
            {%- for call in message['tool_calls'] %}
                {{- '<call>' + call['function']['name'] + call['function']['arguments'] }}
            {%- endfor %}
        {%- else %}
            {{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] + eos_token }}
        {%- endif %}
    {%- endif %}
    {%- if message['role'] == 'tool' %}{{ '<out>' + message['content'] }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<｜Assistant｜>' }}{% if thinking %}<think>{% endif %}
{%- endif %}"""
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "é <b> 'x'"},
    {"role": "assistant", "content": "a</think>b"},
    {"role": "user", "content": "again"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "content": "ok"},
]


def template(source: str = TEMPLATE) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("thinking", [False, True])
def test_it_renders_as_transformers_does(tools: Any, thinking: bool) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    (expected,), _ = utils.render_jinja_template(
        [CONVERSATION],
        tools=tools,
        chat_template=TEMPLATE,
        add_generation_prompt=True,
        thinking=thinking,
        **SPECIAL,
    )
    found = template().render(CONVERSATION, tools=tools, options={"thinking": thinking})
    assert found == expected
    assert found.count(BOS) == 1


def test_what_it_reads_is_known() -> None:
    assert template().takes_tools
    assert template().reasons
    assert "thinking" in template().variables
    assert not template("{{ messages[0].content }}").takes_tools


def test_a_template_that_knows_no_tools_gets_them_described() -> None:
    plain = template("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    alone = plain.render([{"role": "user", "content": "hi"}], tools=TOOLS)
    assert alone.startswith("[system]")
    assert json.dumps(TOOLS[0]["function"]) in alone
    assert CALLS_BEGIN in alone
    assert alone.endswith("[user]hi")
    own = plain.render(CONVERSATION[:2], tools=TOOLS)
    assert own.startswith("[system]Be brief.\n\n")
    assert own.count("[system]") == 1


def test_arguments_are_objects_for_a_template_that_encodes_them_itself() -> None:
    encodes = template(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    assert encodes.render(CONVERSATION) == '{"a": 1}'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[9].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_what_a_template_cannot_do_refuses_the_conversation(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template(source).render([{"role": "user", "content": "hi"}])
    assert caught.value.field == "messages"


def test_a_broken_template_is_named_when_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja"):
        ChatTemplate.load(tmp_path)


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({"bos_token": {"content": "B"}, "chat_template": "{{bos_token}}1"})
    )
    assert rendered(ChatTemplate.load(tmp_path)) == "B1"
    named = [{"name": "tool_use", "template": "2"}, {"name": "default", "template": "3"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert rendered(ChatTemplate.load(tmp_path)) == "3"
    (tmp_path / "chat_template.jinja").write_text("4")
    assert rendered(ChatTemplate.load(tmp_path)) == "4"
    (tmp_path / "own").write_text("5")
    assert rendered(ChatTemplate.load(tmp_path, tmp_path / "own")) == "5"


def rendered(found: ChatTemplate | None) -> str:
    assert found is not None
    return found.render([])
