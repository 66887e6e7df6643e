"""Train the small tokenizer that random checkpoints carry (deepseek_triton/checkpoint/data/).

The result is shipped, so that every machine has the same one; run this only to change it:

    python build_scripts/train_tokenizer.py [--out FILE]

It learns its merges from the standard library's sources and reference pages, so the result depends
on the Python version: 3.11 made the shipped file.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers import processors as post_processors

VOCAB_SIZE = 4096  # all tokens, special ones included

# DeepSeek's layout: control tokens first, then bytes and merges, then the tokens of chats.
CONTROL_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
CHAT_TOKENS = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")

# How DeepSeek-V3 cuts text before merging: up to three digits, runs of Chinese and kana, then words
# with at most one leading character, runs of punctuation, and whitespace.
DIGITS = r"\p{N}{1,3}"
CJK = "[一-龥぀-ゟ゠-ヿ]+"
WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n" + r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+" + "[\r\n]*"
    r"|\s*" + "[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

DEFAULT_OUT = Path(__file__).parent.parent / "deepseek_triton" / "checkpoint" / "data"


def corpus() -> Iterator[str]:
    """Yield source files of the standard library, and its reference pages a few times over."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    for path in sorted(stdlib.glob("*.py")):
        yield path.read_text(encoding="utf-8")
    for _ in range(4):  # English prose, to weigh as much as the code
        yield (stdlib / "pydoc_data" / "topics.py").read_text(encoding="utf-8")


def train(texts: Iterable[str] | None = None, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Return a tokenizer of `vocab_size` tokens that learned from `texts` (default: `corpus()`)."""
    tokenizer = Tokenizer(models.BPE())
    cuts = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in (DIGITS, CJK, WORDS)]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    tokenizer.post_processor = post_processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CHAT_TOKENS),
        special_tokens=[AddedToken(text, normalized=False) for text in CONTROL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus() if texts is None else texts, trainer)
    # As in DeepSeek's own file these are not "special": decoding shows them.
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in CHAT_TOKENS])
    return tokenizer


def main() -> None:
    """Train and write tokenizer.json."""
    parser = argparse.ArgumentParser(description="train the tokenizer of random checkpoints")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT / "tokenizer.json")
    out: Path = parser.parse_args().out
    tokenizer = train()
    compact = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
    out.write_text(compact + "\n", encoding="utf-8")
    print(f"{out}: {tokenizer.get_vocab_size()} tokens, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
