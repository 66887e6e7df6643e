r"""Tool calls in DeepSeek's formats, parsed as they stream.

V3 and R1:  <calls begin><call begin>function<sep>NAME\n```json\n{…}\n```<call end>…<calls end>
V3.1:       <calls begin><call begin>NAME<sep>{…}<call end>…<calls end>

The tags are those of the models' tokenizers; which of the two forms a call has is told by itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from deepseek_triton.text.tags import TagScanner

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"

_TYPE = "function"  # the first word of a call in V3's form
_FENCED = re.compile(r"\s*(?P<name>[^\n]*)\n\s*(?:```(?:json)?[ \t]*\n|(?=[^`\s]))")
_MAY_END = re.compile(r"[\s`]*\Z")  # a closing fence or its beginning; no JSON ends so


@dataclass(frozen=True)
class ToolCallDelta:
    """What was added to call `index`; the first delta of a call has its name."""

    index: int
    name: str | None = None
    arguments: str = ""


class _State(Enum):
    TEXT = "text"
    BETWEEN = "between"  # inside the list of calls, outside of a call
    HEAD = "head"  # before the separator
    BODY = "body"  # after it


class ToolCallParser:
    """Splits one answer's content into text and tool calls.

    What is no call, or one that ends before its name is complete, stays text as it was written.
    Arguments are passed on as the model writes them: they may be no valid JSON.
    """

    def __init__(self) -> None:
        self._scanner = TagScanner([CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR])
        self._state = _State.TEXT
        self._raw = ""  # what has been read of a call whose name is not known
        self._head = ""
        self._body = ""  # not passed on yet
        self._named = False
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Return (content, deltas of calls) that `text` adds."""
        content: list[str] = []
        deltas: list[ToolCallDelta] = []
        for piece, is_tag in self._scanner.push(text):
            if is_tag and self._take_tag(piece, deltas, content):
                continue
            self._take_text(piece, deltas, content)
        return "".join(content), deltas

    def flush(self) -> tuple[str, list[ToolCallDelta]]:
        """Return what was held back, now that the answer has ended."""
        content: list[str] = []
        deltas: list[ToolCallDelta] = []
        rest = self._scanner.flush()
        cut_tag = self._state is _State.BODY and CALL_END.startswith(rest)
        if rest and not cut_tag:
            self._take_text(rest, deltas, content)
        if self._state in (_State.HEAD, _State.BODY):
            self._end_call(deltas, content)
        return "".join(content), deltas

    def _take_tag(self, tag: str, deltas: list[ToolCallDelta], content: list[str]) -> bool:
        """Follow a tag; False if it means nothing where it stands."""
        if self._state in (_State.TEXT, _State.BETWEEN):
            if tag == CALL_BEGIN:
                self._state, self._raw, self._head, self._body = _State.HEAD, tag, "", ""
                self._named = False
            elif tag == CALLS_BEGIN and self._state is _State.TEXT:
                self._state = _State.BETWEEN
            elif tag == CALLS_END and self._state is _State.BETWEEN:
                self._state = _State.TEXT
            else:
                return False
        elif tag == SEPARATOR and self._state is _State.HEAD:
            self._raw += tag
            self._state = _State.BODY
        elif tag == CALL_END:
            self._raw += tag
            self._end_call(deltas, content)
            self._state = _State.BETWEEN
        else:
            return False
        return True

    def _take_text(self, text: str, deltas: list[ToolCallDelta], content: list[str]) -> None:
        if self._state is _State.TEXT:
            # Line feeds after the list of calls are layout.
            if not (self.num_calls and text.isspace()):
                content.append(text)
        elif self._state is _State.BETWEEN:
            if not text.isspace():
                content.append(text)
        elif self._state is _State.HEAD:
            self._raw += text
            self._head += text
        else:
            self._body += text
            if not self._named:
                self._raw += text
                self._find_name(deltas)
            if self._named:
                self._pass_arguments(deltas, final=False)

    def _find_name(self, deltas: list[ToolCallDelta]) -> None:
        head, body = self._head.strip(), self._body.lstrip()
        if head != _TYPE or body.startswith("{"):
            name, rest = head, body
            if not body:
                return
        else:
            match = _FENCED.match(self._body)
            if match is None:
                return
            name, rest = match["name"].strip(), self._body[match.end() :]
        if not name:
            return
        self._named = True
        self._body = rest
        deltas.append(ToolCallDelta(self.num_calls, name))
        self.num_calls += 1

    def _pass_arguments(self, deltas: list[ToolCallDelta], *, final: bool) -> None:
        """Pass on the body but for what may be its closing fence and white space."""
        match = _MAY_END.search(self._body)
        end = len(self._body) if match is None else match.start()
        arguments = self._body[:end]
        self._body = "" if final else self._body[end:]
        if arguments:
            deltas.append(ToolCallDelta(self.num_calls - 1, arguments=arguments))

    def _end_call(self, deltas: list[ToolCallDelta], content: list[str]) -> None:
        if self._state is _State.BODY and not self._named and self._head.strip() not in ("", _TYPE):
            self._named = True  # a call in V3.1's form without arguments
            deltas.append(ToolCallDelta(self.num_calls, self._head.strip()))
            self.num_calls += 1
        if self._named:
            self._pass_arguments(deltas, final=True)
        else:
            content.append(self._raw)
        self._state = _State.TEXT
