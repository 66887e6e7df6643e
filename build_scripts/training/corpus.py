"""From sources to token shards: de-duplicated, split by file and by package, tokenised."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tqdm import tqdm
from train_tokenizer import CONTROL_TOKENS
from train_tokenizer import train as train_tokenizer

from .clean import Function, clean_code, digest, functions, normalise
from .shards import compress
from .sources import SourceFile, read_sources

HELD_OUT_PACKAGES = frozenset({"boltons", "more-itertools", "luigi", "flask"})
HELD_OUT_SHARE = 250  # one file in so many of every other package
TOKENIZER_SHARE = 12  # the tokenizer learns its merges from one file in so many
VOCAB_SIZE = 4096
HEADS = 1000  # held-out functions to complete in the evaluation
_LARGEST_PACKAGE = 24_000_000  # characters: no house style may dominate
_MOST_KNOWN = 0.5  # of a file's functions already seen elsewhere: a copy


@dataclass
class Corpus:
    """Documents of the two splits; a document is a whole file or one function."""

    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    held_out_functions: list[tuple[str, Function]] = field(default_factory=list)  # with its place
    characters: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    files: Counter[tuple[str, str, str]] = field(default_factory=Counter)


def build_corpus(wheels: Path, docs: Path, out: Path) -> None:
    """Write tokenizer.json, train.xz, held_out.xz, heads.json and sources.json to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    corpus = collect(read_sources(wheels, docs))
    sample = [text for text in corpus.train if int(digest(text), 16) % TOKENIZER_SHARE == 0]
    tokenizer = train_tokenizer(sample, VOCAB_SIZE)
    compact = json.loads(tokenizer.to_str())
    text = json.dumps(compact, ensure_ascii=False, separators=(",", ":"))
    (out / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    _write_json(out / "sources.json", _source_table(corpus))
    _write_json(out / "heads.json", _heads(corpus.held_out_functions))
    for name, documents in (("held_out", corpus.held_out), ("train", corpus.train)):
        tokens = tokenise(tokenizer, documents)
        size = sum(len(each.encode()) for each in documents)
        print(f"{name}: {len(documents)} documents, {size} bytes, {len(tokens)} tokens")
        _write_json(out / f"{name}.json", {"bytes": size, "tokens": len(tokens)})
        (out / f"{name}.xz").write_bytes(compress(tokens))


def collect(files: Iterable[SourceFile]) -> Corpus:
    """Clean, de-duplicate and split; a held-out function never occurs in the training split."""
    corpus = Corpus()
    known_files: set[str] = set()
    known_functions: set[str] = set()
    held_out: set[str] = set()
    for file in tqdm(files, disable=None, unit="file"):
        cleaned = clean_code(file.text) if file.is_code else (normalise(file.text), None)
        if cleaned is None:
            continue
        text, tree = cleaned
        key = digest("".join(text.split()))
        found = functions(text, tree) if tree is not None else []
        fresh = [each for each in found if each.key not in known_functions]
        if key in known_files or len(found) - len(fresh) > _MOST_KNOWN * len(found):
            continue
        if is_held_out(file):
            held_out.update(each.key for each in fresh)
        elif any(each.key in held_out for each in found):
            continue
        known_files.add(key)
        known_functions.update(each.key for each in found)
        _file(corpus, file, text, fresh)
    return corpus


def _file(corpus: Corpus, file: SourceFile, text: str, found: list[Function]) -> None:
    """Put one cleaned file into its split: whole, then each of its functions alone."""
    source = (file.source.name, file.source.version, file.source.licence)
    if is_held_out(file):
        corpus.held_out.append(text)
        place = f"{file.source.name}:{file.path}"
        corpus.held_out_functions += [(place, each) for each in found]
        return
    if corpus.characters[source] > _LARGEST_PACKAGE:
        return
    corpus.characters[source] += len(text)
    corpus.files[source] += 1
    corpus.train += [text, *(each.source for each in found)]


def is_held_out(file: SourceFile) -> bool:
    """Whether a file is kept from training: its package is, or its name's hash says so."""
    if file.source.name.lower() in HELD_OUT_PACKAGES:
        return True
    return int(digest(f"{file.source.name}/{file.path}"), 16) % HELD_OUT_SHARE == 0


def tokenise(tokenizer: Tokenizer, documents: list[str]) -> NDArray[np.uint16]:
    """Return [N] uint16: begin token, document, end token, for each document in turn."""
    begin, end = (tokenizer.token_to_id(token) for token in CONTROL_TOKENS[:2])
    parts = []
    for batch in tqdm(list(_batches(documents, 1024)), disable=None, unit="batch"):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            parts.append(np.array([begin, *encoding.ids, end], np.uint16))
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


def _batches(items: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _heads(found: list[tuple[str, Function]]) -> list[dict[str, object]]:
    """The functions whose text has the smallest hash: the same ones on every machine."""
    ordered = sorted(found, key=lambda pair: digest(pair[1].source))
    return [
        {
            "place": place,
            "source": each.source,
            "head_lines": each.head_lines,
            "docstring_lines": each.docstring_lines,
        }
        for place, each in ordered[:HEADS]
    ]


def _source_table(corpus: Corpus) -> list[dict[str, object]]:
    return [
        {
            "name": name,
            "version": version,
            "licence": licence,
            "files": corpus.files[name, version, licence],
            "characters": characters,
        }
        for (name, version, licence), characters in sorted(corpus.characters.items())
    ]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
