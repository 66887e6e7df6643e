from __future__ import annotations

import zipfile
from itertools import islice
from pathlib import Path

import pytest

from deepseek_triton.errors import ConfigError
from deepseek_triton.text.documents import read_documents, standard_library, token_stream
from deepseek_triton.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[3] / "deepseek_triton" / "checkpoint" / "data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "texts" / "inner").mkdir(parents=True)
    for name, text in (("b.py", "b"), ("inner/a.md", "ä"), ("c.bin", "c")):
        (tmp_path / "texts" / name).write_text(text, encoding="utf-8")
    (tmp_path / "texts" / "latin.txt").write_bytes(b"\xff")
    return tmp_path / "texts"


def test_a_folder_and_its_archive_hold_the_same_documents(folder: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in folder.rglob("*.*"):
            archive.write(path, path.relative_to(folder))
    assert list(read_documents(folder)) == list(read_documents(wheel)) == ["b", "ä"]
    assert list(read_documents(folder / "c.bin")) == ["c"]


def test_a_file_that_cannot_be_read_is_named(folder: Path) -> None:
    for name in ("latin.txt", "missing.txt"):
        with pytest.raises(ConfigError, match=f"TEXT: .*{name} cannot be read"):
            list(read_documents(folder / name))


def test_a_folder_without_texts_is_named_as_the_user_gave_it(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"CALIBRATION: {tmp_path} holds no UTF-8 text"):
        list(read_documents(tmp_path, "CALIBRATION"))


def test_the_standard_library_is_a_mixture_of_python_sources() -> None:
    documents = list(islice(standard_library(), 40))
    assert documents == list(islice(standard_library(), 40))
    assert sum(len(document) for document in documents) > 200_000
    assert sum("import" in document for document in documents) > 25


def test_documents_follow_one_another_between_their_marks() -> None:
    tokenizer = Tokenizer.load(DATA)
    end = tokenizer.eos_token_id
    stream = token_stream(tokenizer, ["one", "two words"])
    assert stream.tolist() == [*tokenizer.encode("one"), end, *tokenizer.encode("two words"), end]
    assert token_stream(tokenizer, iter(["one", "two words", 3]), 4).tolist() == stream[:4].tolist()
    assert token_stream(tokenizer, []).size == 0
