"""A checkpoint's own chat template: messages to the text of a prompt.

Templates are Jinja programs that came with the weights, so they run in Jinja's sandbox, with the
helpers that the authors of such templates count on (those of transformers' apply_chat_template).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from deepseek_triton.checkpoint.fields import read_json_object
from deepseek_triton.errors import CheckpointError, InvalidRequestError, TokenizerError
from deepseek_triton.text.reasoning import CLOSE
from deepseek_triton.text.tokenizer import CONFIG_FILE
from deepseek_triton.text.tool_calls import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
)

TEMPLATE_FILE = "chat_template.jinja"

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_TOOLS_PREAMBLE = f"""You may call functions. Each is described here by a JSON object:
%s
To call some, answer with exactly this, and no text after it, one part between \
{CALL_BEGIN} and {CALL_END} for each call:
{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}NAME
```json
ARGUMENTS AS A JSON OBJECT
```{CALL_END}{CALLS_END}"""


class _Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks what training learns; here it only stays."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. Rendering changes nothing; threads may share it."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], where: str = TEMPLATE_FILE
    ) -> None:
        """Compile `source`; raises TokenizerError naming `where`."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TokenizerError(f"{where}: not a usable chat template ({error})") from error
        self._special_tokens = dict(special_tokens)
        self.takes_tools = "tools" in variables
        """Whether the template itself tells the model about tools."""
        self.variables = frozenset(variables)
        """Names that it reads, those of `render` and of its own options."""
        self.reasons = CLOSE in source
        """Whether the model it was written for reasons between <think> and </think>."""
        self.fences_arguments = not self.takes_tools or "```json" in source
        """Whether calls are in V3's form, rather than V3.1's."""
        self._arguments_as_objects = bool(re.search(r"arguments\s*\|\s*(tojson|items)", source))

    @classmethod
    def load(cls, directory: Path | str, override: Path | None = None) -> ChatTemplate | None:
        """Load the template of a checkpoint or engine, or the file `override` in its place.

        None: it has none. Raises TokenizerError for one that cannot be read.
        """
        folder = Path(directory)
        try:
            path = folder / CONFIG_FILE
            config = read_json_object(path) if path.is_file() else {}
            where = override or folder / TEMPLATE_FILE
            if override is not None or where.is_file():
                source: str | None = where.read_text(encoding="utf-8")
            else:
                source, where = _choose(config.get("chat_template")), path
        except (CheckpointError, OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"chat template: {error}") from error
        return None if source is None else cls(source, _special_tokens(config), str(where))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt of a conversation in OpenAI's form, whose contents are text.

        `options` are further variables of the template. A template that knows nothing of tools gets
        them described in the system message. Raises InvalidRequestError for a conversation that
        the template refuses or fails on.
        """
        conversation = [self._prepared(message) for message in messages]
        if tools and not self.takes_tools:
            conversation, tools = _with_preamble(conversation, tools), None
        try:
            return self._template.render(
                {
                    **(options or {}),
                    **self._special_tokens,
                    "messages": conversation,
                    **({"tools": list(tools)} if tools else {}),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # a program of the checkpoint's: anything may go wrong in it
            raise InvalidRequestError(
                "messages", f"the model's chat template does not take them: {error}"
            ) from error

    def _prepared(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of one message, arguments of its calls as the template reads them."""
        prepared = dict(message)
        if self._arguments_as_objects and prepared.get("tool_calls"):
            prepared["tool_calls"] = [
                {**call, "function": _with_object(call["function"])}
                for call in prepared["tool_calls"]
            ]
        return prepared


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {**function, "arguments": json.loads(function["arguments"])}
    except ValueError as error:
        raise InvalidRequestError(
            "messages", f"arguments of the call of {function['name']!r} are not JSON ({error})"
        ) from error


def _with_preamble(
    conversation: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    preamble = _TOOLS_PREAMBLE % "\n".join(_tojson(tool["function"]) for tool in tools)
    if conversation and conversation[0].get("role") == "system":
        first = conversation[0]
        merged = {**first, "content": f"{first['content']}\n\n{preamble}"}
        return [merged, *conversation[1:]]
    return [{"role": "system", "content": preamble}, *conversation]


def _choose(template: object) -> str | None:
    """Return the one to use of what tokenizer_config.json holds: a text, or several with names."""
    if isinstance(template, list):
        named = {t["name"]: t["template"] for t in template if isinstance(t, dict)}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key in _SPECIAL_TOKENS:
        token = config.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[key] = text
    return found


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
