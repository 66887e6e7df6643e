from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton.text.stop_strings import StopStringMatcher


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Grow the text by a character at a time; stop as soon as it ends with a stop string."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopStringMatcher(stops)
    emitted = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        emitted += text
        if matched is not None:
            return emitted, matched
    return emitted + matcher.flush(), None


TEXT = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", max_size=5), max_size=4)


@given(pieces=st.lists(TEXT, max_size=8), stops=STOPS)
def test_any_split_gives_the_naive_answer(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops) == naive("".join(pieces), stops)


@given(text=TEXT, stops=STOPS)
def test_only_what_may_become_a_stop_string_is_held(text: str, stops: list[str]) -> None:
    emitted, matched = StopStringMatcher(stops).push(text)
    if matched is None:
        held = text[len(emitted) :]
        longer = [text[start:] for start in range(len(emitted))]
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(suffix) for stop in stops for suffix in longer)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["one\ntwo"], ["\n"], ("one", "\n")),
        (["fo", "o"], ["foo", " bar"], ("", "foo")),
        (["a b", "ar"], ["foo", " bar"], ("a", " bar")),
        (["anything"], [], ("anything", None)),
        (["anything"], ["", ""], ("anything", None)),
        (["abab", "c"], ["ababc"], ("", "ababc")),
        (["aba", "bac"], ["abac"], ("ab", "abac")),
        (["日", "本語"], ["本語"], ("日", "本語")),
    ],
)
def test_stop_strings_end_the_text_before_them(
    pieces: list[str], stops: list[str], expected: tuple[str, str | None]
) -> None:
    assert run(pieces, stops) == expected


def test_the_stop_string_that_completes_first_wins() -> None:
    assert StopStringMatcher(["abcd", "bc"]).push("abcd") == ("a", "bc")
    assert StopStringMatcher(["ab", "abcd"]).push("abcd") == ("", "ab")


def test_of_those_that_complete_together_the_longest_wins() -> None:
    assert StopStringMatcher(["c", "abc", "bc"]).push("xabc") == ("x", "abc")


def test_nothing_is_emitted_after_a_match() -> None:
    matcher = StopStringMatcher(["."])
    assert matcher.push("end. more") == ("end", ".")
    assert matcher.push("still more") == ("", ".")
    assert matcher.flush() == ""


def test_held_text_comes_when_it_can_no_longer_match() -> None:
    matcher = StopStringMatcher(["STOP"])
    assert matcher.push("say ST") == ("say ", None)
    assert matcher.push("ART") == ("START", None)
    assert matcher.push("S") == ("", None)
    assert matcher.flush() == "S"


def test_many_long_stop_strings_do_not_slow_a_character_down() -> None:
    stops = ["a" * length + "b" for length in range(500, 520)]
    matcher = StopStringMatcher(stops)
    start = time.process_time()
    for _ in range(20_000):
        matcher.push("a")
    assert time.process_time() - start < 2.0
