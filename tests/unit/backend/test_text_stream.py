from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton.backend.packet import TextOptions
from deepseek_triton.backend.text_stream import TextStream
from deepseek_triton.request import FinishReason
from tests.unit.backend.fakes import TOKENIZER

IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=12)


def ids_of(text: str) -> list[int]:
    return [i for i in TOKENIZER.encode(text) if i != TOKENIZER.bos_token_id]


def stream(*stop: str, echo: tuple[int, ...] = ()) -> TextStream:
    return TextStream(TOKENIZER, TextOptions(stream=True, stop=stop, echo_ids=echo))


def run(groups: list[list[int]], *stop: str) -> tuple[str, list[float], TextStream]:
    """Push groups of ids, each id with its position as log prob; return text and log probs."""
    text = stream(*stop)
    position, pieces, log_probs = 0, "", []
    for i, group in enumerate(groups):
        reason = FinishReason.LENGTH if i == len(groups) - 1 else None
        text.push(group, [float(position + j) for j in range(len(group))], reason)
        position += len(group)
        piece = text.take()
        pieces += piece.text
        log_probs += piece.log_probs
    return pieces, log_probs, text


def test_joined_pieces_are_the_whole_text_with_the_first_space() -> None:
    ids = ids_of(" hello world, naïve 🙂")
    pieces, _, text = run([[i] for i in ids])
    assert pieces == TOKENIZER.decode(ids) == " hello world, naïve 🙂"
    assert text.finish_reason is FinishReason.LENGTH
    assert text.num_output_tokens == len(ids)


def test_a_stop_string_over_several_tokens_ends_the_text_before_it() -> None:
    ids = ids_of("one two three four")
    pieces, log_probs, text = run([[i] for i in ids], "o thr")
    assert pieces == "one tw"
    assert text.finish_reason is FinishReason.STOP
    assert text.num_output_tokens == len(log_probs) < len(ids)
    assert text.cum_log_prob == sum(log_probs)


def test_text_that_could_become_a_stop_string_comes_at_the_end() -> None:
    pieces, _, text = run([[i] for i in ids_of("one tw")], "two")
    assert pieces == "one tw"
    assert text.finish_reason is FinishReason.LENGTH


@settings(deadline=None)  # the machine may be busy
@given(IDS, st.lists(st.integers(0, 12)), st.lists(st.text("abe \n", max_size=3), max_size=3))
def test_nothing_depends_on_how_tokens_are_grouped(
    ids: list[int], cuts: list[int], stop: list[str]
) -> None:
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    grouped = [ids[a:b] for a, b in zip(edges, edges[1:], strict=False)] or [[]]
    single = [[i] for i in ids] or [[]]
    by_group, by_token = run(grouped, *stop), run(single, *stop)
    assert by_group[:2] == by_token[:2]
    for attribute in ("finish_reason", "num_output_tokens", "cum_log_prob"):
        assert getattr(by_group[2], attribute) == getattr(by_token[2], attribute)


def test_the_echo_comes_first_and_is_not_searched_for_stop_strings() -> None:
    text = stream("stop", echo=tuple(TOKENIZER.encode("do not stop")))
    text.push(ids_of(" here"), (), FinishReason.LENGTH)
    assert text.take().text == "do not stop here"


@pytest.mark.parametrize("reason", FinishReason)
def test_an_unfinished_character_is_replaced_at_the_end(reason: FinishReason) -> None:
    first = ids_of("🙂")[0]
    text = stream("x")
    text.push([first])
    assert text.take().text == ""
    text.push([], (), reason)
    assert text.take().text == "\ufffd"
    assert text.finish_reason is reason


def test_the_last_bytes_may_complete_a_stop_string() -> None:
    text = stream("\ufffd")
    text.push([ids_of("🙂")[0]], (), FinishReason.LENGTH)
    assert (text.take().text, text.finish_reason) == ("", FinishReason.STOP)


def test_nothing_is_added_after_the_end() -> None:
    text = stream("b")
    text.push(ids_of("a b c"))
    counted = text.num_output_tokens
    text.push(ids_of(" d"), (), FinishReason.LENGTH)
    assert text.take().text == "a "
    assert text.num_output_tokens == counted
    assert text.finish_reason is FinishReason.STOP
