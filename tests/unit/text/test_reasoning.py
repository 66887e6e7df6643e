from __future__ import annotations

import pytest

from deepseek_triton.text.reasoning import ReasoningSplitter, begins_inside


def split(text: str, size: int, *, inside: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(inside=inside)
    parts = [splitter.push(text[i : i + size]) for i in range(0, len(text), size)]
    parts.append(splitter.flush())
    return "".join(r for r, _ in parts), "".join(c for _, c in parts)


CASES = [
    # R1's template opens the reasoning: the answer holds the closing tag alone.
    (True, "1+1 is 2.</think>2", ("1+1 is 2.", "2")),
    (True, "\nLine one.\nLine two.\n</think>\n\nAnswer\n", ("Line one.\nLine two.", "Answer\n")),
    # The answer opens it itself.
    (False, "<think>\nHm.\n</think>\n\nYes", ("Hm.", "Yes")),
    (False, "  <think>Hm.</think>Yes", ("Hm.", "Yes")),
    # Cut inside, or inside a tag.
    (True, "Let me see\n", ("Let me see", "")),
    (True, "Let me see</thi", ("Let me see</thi", "")),
    (False, "<thi", ("", "<thi")),
    (False, "<think>", ("", "")),
    (True, "", ("", "")),
    # No reasoning at all.
    (False, "Just an answer", ("", "Just an answer")),
    (False, "  \n indented", ("", "  \n indented")),
    # Only the first pair counts.
    (False, "a <think> b </think> c", ("", "a <think> b </think> c")),
    (True, "a</think>b</think>c", ("a", "b</think>c")),
    (True, "</think>only an answer", ("", "only an answer")),
]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize(("inside", "text", "expected"), CASES)
def test_reasoning_and_content_are_told_apart(
    inside: bool, text: str, expected: tuple[str, str], size: int
) -> None:
    assert split(text, size, inside=inside) == expected


def test_content_is_passed_on_at_once() -> None:
    splitter = ReasoningSplitter(inside=True)
    assert splitter.push("Thinking") == ("Thinking", "")
    assert splitter.push(" on</think>Yes") == (" on", "Yes")
    assert splitter.push(", <really") == ("", ", <really")


def test_a_prompt_that_ends_with_the_opening_tag_begins_inside() -> None:
    assert begins_inside("<｜Assistant｜><think>\n")
    assert begins_inside("<｜Assistant｜><think>")
    assert not begins_inside("<｜Assistant｜></think>")
    assert not begins_inside("<think>over</think>")
