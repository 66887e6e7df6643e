from __future__ import annotations

import pytest

from deepseek_triton.text.tool_calls import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
    ToolCallParser,
)


def v3(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


def v31(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}"


def parse(text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    """The content, and name and arguments of each call, as a client puts deltas together."""
    parser = ToolCallParser()
    parts = [parser.push(text[i : i + size]) for i in range(0, len(text), size)]
    parts.append(parser.flush())
    calls: list[tuple[str, str]] = []
    for _, deltas in parts:
        for delta in deltas:
            if delta.name is not None:
                assert delta.index == len(calls), "a call's first delta has its name"
                calls.append((delta.name, ""))
            name, arguments = calls[delta.index]
            calls[delta.index] = (name, arguments + delta.arguments)
    assert parser.num_calls == len(calls)
    return "".join(content for content, _ in parts), calls


WEATHER = '{"city": "Paris", "days": 2}'
TRICKY = '{"code": "```py\\n```", "sep": "a\\nb  "}'
CASES = {
    "v3": (f"{CALLS_BEGIN}{v3('weather', WEATHER)}{CALLS_END}", "", [("weather", WEATHER)]),
    "v3, two, after text": (
        f"I look.{CALLS_BEGIN}{v3('a', '{}')}\n{v3('b', TRICKY)}{CALLS_END}\n",
        "I look.",
        [("a", "{}"), ("b", TRICKY)],
    ),
    "v3.1": (f"{CALLS_BEGIN}{v31('weather', WEATHER)}{CALLS_END}", "", [("weather", WEATHER)]),
    "v3.1, two": (
        f"{CALLS_BEGIN}{v31('a', TRICKY)}{v31('b', '{}')}{CALLS_END}",
        "",
        [("a", TRICKY), ("b", "{}")],
    ),
    "v3.1, a tool named function": (
        f"{CALLS_BEGIN}{v31('function', '{}')}{CALLS_END}",
        "",
        [("function", "{}")],
    ),
    "without the outer tags": (f"{v3('weather', WEATHER)}", "", [("weather", WEATHER)]),
    "v3 without a fence": (
        f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}f\n{WEATHER}{CALL_END}{CALLS_END}",
        "",
        [("f", WEATHER)],
    ),
    "not JSON": (f"{CALLS_BEGIN}{v31('f', 'x = 1')}{CALLS_END}", "", [("f", "x = 1")]),
    "no arguments": (f"{CALLS_BEGIN}{v31('f', '')}{CALLS_END}", "", [("f", "")]),
    "no separator": (f"{CALL_BEGIN}what{CALL_END}", f"{CALL_BEGIN}what{CALL_END}", []),
    "stray tags": (f"a{SEPARATOR}b{CALL_END}c", f"a{SEPARATOR}b{CALL_END}c", []),
    "no call": ("a < b and <｜tool", "a < b and <｜tool", []),
}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("name", CASES)
def test_calls_are_found_however_the_text_is_split(name: str, size: int) -> None:
    text, content, calls = CASES[name]
    assert parse(text, size) == (content, calls)


@pytest.mark.parametrize("call", [v3("weather", WEATHER), v31("weather", WEATHER)])
def test_an_answer_cut_anywhere_loses_nothing_and_invents_nothing(call: str) -> None:
    whole = CALLS_BEGIN + call
    for end in range(len(whole)):
        content, calls = parse(whole[:end], 3)
        if calls:
            ((name, arguments),) = calls
            assert "weather".startswith(name)
            assert WEATHER.startswith(arguments)
        elif end > len(CALLS_BEGIN):
            assert whole[:end].endswith(content)


def test_arguments_stream() -> None:
    parser = ToolCallParser()
    parser.push(f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}weather\n```json\n")
    _, deltas = parser.push('{"city": "Par')
    assert [delta.arguments for delta in deltas] == ['{"city": "Par']
