from __future__ import annotations

import json
import runpy
from importlib import resources
from pathlib import Path

from deepseek_triton.checkpoint.random import TOKENIZER_VOCAB_SIZE
from deepseek_triton.text.tokenizer import Tokenizer

DATA = Path(str(resources.files("deepseek_triton.checkpoint") / "data"))
SCRIPT = Path(__file__).parents[3] / "build_scripts" / "train_tokenizer.py"


def test_the_shipped_tokenizer_follows_the_training_script() -> None:
    script = runpy.run_path(str(SCRIPT), run_name="train_tokenizer")
    shipped = json.loads((DATA / "tokenizer.json").read_text(encoding="utf-8"))
    steps = shipped["pre_tokenizer"]["pretokenizers"]
    rules = [step["pattern"]["Regex"] for step in steps if step["type"] == "Split"]
    assert rules == [script["DIGITS"], script["CJK"], script["WORDS"]]
    added = [token["content"] for token in shipped["added_tokens"]]
    assert added == [*script["CONTROL_TOKENS"], *script["CHAT_TOKENS"]]
    assert script["VOCAB_SIZE"] == TOKENIZER_VOCAB_SIZE


def test_the_shipped_tokenizer_is_small_and_dense() -> None:
    shipped = json.loads((DATA / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {*shipped["model"]["vocab"].values(), *(t["id"] for t in shipped["added_tokens"])}
    assert ids == set(range(TOKENIZER_VOCAB_SIZE))
    assert (DATA / "tokenizer.json").stat().st_size < 300_000


def test_words_take_few_tokens() -> None:
    text = "The value of the expression is returned by the function, as an object of the class."
    assert len(Tokenizer.load(DATA).encode(text)) < len(text) / 3
