from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from deepseek_triton.errors import InvalidRequestError
from deepseek_triton.text.guide import GuideCompiler
from deepseek_triton.text.tokenizer import Tokenizer

FOLDER = Path(str(resources.files("deepseek_triton.checkpoint") / "data"))
TOKENIZER = Tokenizer.load(FOLDER)
END = TOKENIZER.eos_token_id or 0
VOCAB = TOKENIZER.vocab_size + 7  # a model's vocabulary may be padded
COMPILER = GuideCompiler(FOLDER / "tokenizer.json", VOCAB, [END])
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}


def allowed(state) -> set[int]:
    bits = np.unpackbits(state.allowed().view(np.uint8), bitorder="little", count=VOCAB)
    return set(np.flatnonzero(bits).tolist())


def walk(kind: str, text: str, seed: int, most: int = 400) -> str:
    """The text of tokens drawn at random from those that are allowed."""
    generator = np.random.default_rng(seed)
    state = COMPILER.compile(kind, text).start()
    drawn: list[int] = []
    while not state.is_complete and len(drawn) < most:
        token = int(generator.choice(sorted(allowed(state))))
        assert token < TOKENIZER.vocab_size, "a token that is padding"
        if token == END:
            break
        assert state.accept(token) == ""
        drawn.append(token)
    return b"".join(map(TOKENIZER.token_bytes, drawn)).decode()


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_drawn_follows_the_schema(seed: int) -> None:
    found = json.loads(walk("json_schema", json.dumps(SCHEMA), seed))
    assert found.keys() == {"n", "kind"}
    assert isinstance(found["n"], int) and found["kind"] in ("a", "b")


def test_a_regular_expression_and_a_grammar_are_kept() -> None:
    assert walk("regex", "[ab]{3}", 0).strip("ab") == ""
    assert walk("lark", 'start: "x" "y"+ "z"', 0, most=50).startswith("xy")


def test_any_json_may_come_without_a_schema() -> None:
    state = COMPILER.compile("json", "").start()
    for text in ("[", "1", "]"):
        (token,) = TOKENIZER.encode(text)[1:]
        assert token in allowed(state)
        assert state.accept(token) == ""


def test_a_token_that_is_not_allowed_is_told() -> None:
    state = COMPILER.compile("regex", "a").start()
    assert state.accept(TOKENIZER.encode("b")[-1])


def test_states_of_one_guide_are_independent() -> None:
    guide = COMPILER.compile("regex", "ab")
    first, second = guide.start(), guide.start()
    first.accept(TOKENIZER.encode("a")[-1])
    assert allowed(first) != allowed(second)


@pytest.mark.parametrize(
    ("kind", "text", "field"),
    [
        ("ebnf_grammar", "x", "guided_decoding_guide_type"),
        ("", "x", "guided_decoding_guide_type"),
        ("json", "{}", "guided_decoding_guide"),
        ("json_schema", "", "guided_decoding_guide"),
        ("json_schema", "{", "guided_decoding_guide"),
        ("json_schema", '{"type": "nothing"}', "guided_decoding_guide"),
        ("json_schema", '{"not": {}}', "guided_decoding_guide"),
        ("json_schema", '{"a":' * 600 + "1" + "}" * 600, "guided_decoding_guide"),
        ("regex", "(", "guided_decoding_guide"),
        ("regex", "a" * 300_000, "guided_decoding_guide"),
        ("lark", "start: missing", "guided_decoding_guide"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(kind: str, text: str, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        COMPILER.compile(kind, text)
    assert caught.value.field == field


def test_a_vocabulary_that_cannot_be_read_refuses_guides_alone(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    broken = GuideCompiler(tmp_path / "tokenizer.json", VOCAB, [END])
    broken.prepare()
    with pytest.raises(InvalidRequestError, match="leave it out"):
        broken.compile("regex", "a")
