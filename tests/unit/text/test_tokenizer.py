from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton.errors import TokenizerError
from deepseek_triton.text.tokenizer import ROUND_TRIP_TEXTS, Tokenizer

DATA = Path(str(resources.files("deepseek_triton.checkpoint") / "data"))
TOKENIZER = Tokenizer.load(DATA)
BOS = "<｜begin▁of▁sentence｜>"


def copy_of(folder: Path, *, config: dict[str, Any] | None = None, **parts: Any) -> Path:
    """Write the shipped tokenizer with some parts of tokenizer.json replaced."""
    content = json.loads((DATA / "tokenizer.json").read_text(encoding="utf-8")) | parts
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    if config is None:
        shutil.copy(DATA / "tokenizer_config.json", folder)
    else:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def bos_template(suffix: bool = False) -> dict[str, Any]:
    """Return a post-processor as transformers writes it: BOS before the text."""
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    single: list[Any] = [bos, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": [*single, bos] if suffix else single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [0], "tokens": [BOS]}},
    }


@given(st.text())
def test_text_comes_back_as_it_was(text: str) -> None:
    if not any(token in text for token in ("<｜", "<think", "</think")):
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize("text", ROUND_TRIP_TEXTS)
def test_ids_are_those_of_tokenizer_json(text: str) -> None:
    library = tokenizers.Tokenizer.from_file(str(DATA / "tokenizer.json"))
    assert TOKENIZER.encode(text) == [0, *library.encode(text, add_special_tokens=False).ids]


def test_special_ids_are_read_as_text_or_as_objects(tmp_path: Path) -> None:
    assert (TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id) == (0, 1, 2)
    config = {"bos_token": {"content": BOS, "special": True}, "eos_token": None}
    loaded = Tokenizer.load(copy_of(tmp_path, config=config))
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (0, None, None)


def test_bos_is_added_once() -> None:
    assert TOKENIZER.encode("hi")[0] == 0
    assert TOKENIZER.encode("hi").count(0) == 1
    assert TOKENIZER.encode(BOS + "hi") == TOKENIZER.encode("hi")
    assert TOKENIZER.encode("") == [0]


@pytest.mark.parametrize(
    ("add_bos_token", "template", "expected"),
    [(True, True, 1), (True, False, 1), (False, True, 0), (False, False, 0), (None, True, 1)],
)
def test_bos_follows_the_config_and_else_the_post_processor(
    tmp_path: Path, add_bos_token: bool | None, template: bool, expected: int
) -> None:
    config: dict[str, Any] = {"bos_token": BOS}
    if add_bos_token is not None:
        config["add_bos_token"] = add_bos_token
    parts = {"post_processor": bos_template()} if template else {}
    assert Tokenizer.load(copy_of(tmp_path, config=config, **parts)).encode("hi").count(0) == (
        expected
    )


def test_truncation_and_padding_in_the_file_are_switched_off(tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    loaded = Tokenizer.load(copy_of(tmp_path, truncation=truncation))
    assert loaded.decode(loaded.encode("word " * 50)) == "word " * 50


def test_token_bytes_join_to_the_text() -> None:
    text = "naïve 你好 🎉\t\n"
    ids = TOKENIZER.encode(text)
    assert b"".join(map(TOKENIZER.token_bytes, ids)).decode() == text
    assert TOKENIZER.token_bytes(0) == b""
    assert TOKENIZER.token_bytes(-1) == b""
    assert TOKENIZER.token_bytes(TOKENIZER.vocab_size) == b""


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always",
                      "split": True}}, r"decoder \(Metaspace\) is not byte-level"),
        ({"decoder": None}, "is not byte-level"),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, "comes back"),
        ({"normalizer": {"type": "NFC"}}, "comes back"),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always",
                            "split": True}}, "comes back"),
        ({"post_processor": bos_template(suffix=True)}, "post_processor adds tokens"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_would_change_text_is_refused(
    tmp_path: Path, parts: dict[str, Any], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.load(copy_of(tmp_path, **parts))
    assert "tokenizer.json" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bos_token": "<nope>"}, "bos_token '<nope>' is not in the vocabulary"),
        ({"eos_token": 3}, "eos_token 3 is not in the vocabulary"),
        ({"add_bos_token": True}, "add_bos_token is set without a bos_token"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(copy_of(tmp_path, config=config))


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not found"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a readable tokenizer"):
        Tokenizer.load(tmp_path)
    copy_of(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: not valid JSON"):
        Tokenizer.load(tmp_path)


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        TOKENIZER.encode("a\ud800")
