"""Text for calibration and evaluation: documents from files, as one stream of token ids."""

from __future__ import annotations

import hashlib
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.errors import ConfigError
from deepseek_triton.text.tokenizer import Tokenizer

_SUFFIXES = (".py", ".md", ".rst", ".txt")  # what is read of a folder or a wheel
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "ensurepip", "site-packages", "__pycache__"}


def read_documents(path: Path, setting: str = "TEXT") -> Iterator[str]:
    """Yield the UTF-8 texts at `path`, in the order of their names.

    A file is one document; of a folder or a wheel (any zip archive) every .py, .md, .rst and .txt
    file is. Those that are not UTF-8 are left out, unless `path` names one.

    Raises ConfigError, in which `setting` is what the user gave `path` as, also if there is none.
    """
    found = False
    for text in _texts_at(path, setting):
        found = True
        yield text
    if not found:
        kinds = ", ".join(_SUFFIXES)
        raise ConfigError(f"{setting}: {path} holds no UTF-8 text (of {kinds}); give another")


def _texts_at(path: Path, setting: str) -> Iterator[str]:
    try:
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES and p.is_file())
            yield from _decoded(file.read_bytes() for file in files)
        elif zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names = sorted(n for n in archive.namelist() if n.endswith(_SUFFIXES))
                yield from _decoded(archive.read(name) for name in names)
        else:
            yield path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{setting}: {path} cannot be read as UTF-8 text ({error})") from error


def standard_library() -> Iterator[str]:
    """Yield the sources of this Python's standard library, in the order of their names' hashes.

    So the first ones are a mixture rather than what begins with "a", the same on every machine with
    the same Python.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    names = [name for name in names if not _LEFT_OUT.intersection(name.split("/"))]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    yield from _decoded((root / name).read_bytes() for name in names)


def token_stream(
    tokenizer: Tokenizer, documents: Iterable[str], limit: int | None = None
) -> NDArray[np.int32]:
    """Return [N] int32: each document between its begin and end token, up to `limit` tokens."""
    parts: list[NDArray[np.int32]] = []
    total = 0
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for document in documents:
        ids = np.array([*tokenizer.encode(document), *end], np.int32)
        parts.append(ids)
        total += len(ids)
        if limit is not None and total >= limit:
            break
    stream = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    return stream[:limit]


def _decoded(files: Iterable[bytes]) -> Iterator[str]:
    for data in files:
        try:
            yield data.decode("utf-8")
        except UnicodeDecodeError:
            continue
