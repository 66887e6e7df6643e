from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton.text.detokenizer import IncrementalDetokenizer
from deepseek_triton.text.tokenizer import Tokenizer

DATA = Path(str(resources.files("deepseek_triton.checkpoint") / "data"))
TOKENIZER = Tokenizer.load(DATA)

HIGH_BYTE_IDS = [i for i in range(3, 259) if TOKENIZER.token_bytes(i)[0] >= 0x80]

# Past the vocabulary too: a model's may be padded. Bytes above 127 often, to break characters.
IDS = st.one_of(
    st.integers(min_value=0, max_value=TOKENIZER.vocab_size + 5), st.sampled_from(HIGH_BYTE_IDS)
)


def pieces(groups: list[list[int]]) -> list[str]:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    return [*(detokenizer.push(group) for group in groups), detokenizer.flush()]


def test_the_whole_byte_range_is_there() -> None:
    single = {TOKENIZER.token_bytes(i) for i in range(3, 259)}
    assert single == {bytes([byte]) for byte in range(256)}
    assert len(HIGH_BYTE_IDS) == 128


@given(st.lists(st.lists(IDS, max_size=6), max_size=10))
def test_any_ids_in_any_split_give_the_one_shot_text(groups: list[list[int]]) -> None:
    ids = [token_id for group in groups for token_id in group]
    assert "".join(pieces(groups)) == TOKENIZER.decode(ids)


@given(st.text())
def test_any_text_comes_back_token_by_token(text: str) -> None:
    ids = TOKENIZER.encode(text)
    streamed = pieces([[token_id] for token_id in ids])
    assert "".join(streamed) == text


def test_a_broken_character_waits_for_its_last_byte() -> None:
    ids = TOKENIZER.encode("🎉")[1:]
    assert len(ids) == 4
    assert pieces([[token_id] for token_id in ids]) == ["", "", "", "🎉", ""]


def test_the_first_tokens_space_is_kept() -> None:
    ids = TOKENIZER.encode(" the")
    assert "".join(pieces([[token_id] for token_id in ids])) == " the"


def test_special_tokens_add_nothing_and_do_not_break_a_character() -> None:
    first, *rest = TOKENIZER.encode("é")[1:]
    assert rest
    assert "".join(pieces([[first], [0, 1, 2], rest])) == "é"
    assert TOKENIZER.decode([first, 0, 1, 2, *rest]) == "é"


def test_chat_tokens_are_text() -> None:
    ids = TOKENIZER.encode("</think>")[1:]
    assert len(ids) == 1
    assert pieces([ids]) == ["</think>", ""]


@pytest.mark.parametrize("text", ["🎉", "你"])
def test_an_unfinished_character_becomes_one_replacement_at_the_end(text: str) -> None:
    ids = TOKENIZER.encode(text)[1:-1]
    assert pieces([ids]) == ["", "\ufffd"]
    assert TOKENIZER.decode(ids) == "\ufffd"


def test_flush_starts_afresh() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    detokenizer.push(TOKENIZER.encode("🎉")[1:3])
    detokenizer.flush()
    assert detokenizer.push(TOKENIZER.encode("ok")) == "ok"
