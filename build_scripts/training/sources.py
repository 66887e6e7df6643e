"""Where the training text comes from: packages, the standard library and its documentation."""

from __future__ import annotations

import re
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path, PurePosixPath

INSTALLED = (
    "aiohttp anyio click filelock fsspec gevent httpx2 huggingface_hub jinja2 mypy networkx numpy "
    "onnx packaging pytest setuptools sympy torch transformers typer urllib3"
).split()
"""Packages read from the environment itself, where the test dependencies are installed."""

_PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|ISC|PSF|HPND|Python Software Foundation|matplotlib)", re.IGNORECASE
)
_COPYLEFT = re.compile(r"\b(A?GPL|LGPL|MPL|GNU|Mozilla|EUPL|CDDL)", re.IGNORECASE)

# Tests repeat themselves, vendored copies are counted with their own package, migrations are
# written by a program.
_SKIPPED_DIRS = {
    *("test", "tests", "idlelib", "lib2to3", "ensurepip", "site-packages"),
    *("_vendor", "vendor", "vendored", "extern", "externals", "migrations"),
}
_LARGEST_FILE = 200_000  # bytes


@dataclass(frozen=True)
class Source:
    """One distribution: what the model card has to name."""

    name: str
    version: str
    licence: str


@dataclass(frozen=True)
class SourceFile:
    """One text, not yet cleaned."""

    source: Source
    path: str  # inside the distribution
    text: str

    @property
    def is_code(self) -> bool:
        """Python rather than documentation."""
        return self.path.endswith(".py")


def read_sources(wheels: Path, docs: Path) -> Iterator[SourceFile]:
    """Yield every text, in an order that depends on names alone.

    wheels: folder of *.whl files; docs: folder of the Python documentation's *.rst.txt sources.
    """
    yield from _standard_library()
    yield from _python_docs(docs)
    for name in INSTALLED:
        yield from _installed(name)
    for wheel in sorted(wheels.glob("*.whl"), key=lambda path: path.name.lower()):
        yield from _wheel(wheel)


def _licence(headers: Message) -> str | None:
    """The licence that the metadata names, or None when it is not a permissive one."""
    fields = [headers.get("License-Expression", "")]
    fields += headers.get_all("Classifier", [])
    named = [field.split("::")[-1].strip() for field in fields if _names_licence(field)]
    if not named:  # an older metadata version: free text, sometimes the whole licence
        named = [" ".join(headers.get("License", "").split())[:60]]
    licence = "; ".join(dict.fromkeys(named))
    if not _PERMISSIVE.search(licence) or _COPYLEFT.search(licence):
        return None
    return licence


def _names_licence(field: str) -> bool:
    return (
        field.startswith("License ::")
        and field.count("::") > 1
        or "::" not in field
        and field != ""
    )


def _wanted(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return path.endswith(".py") and not _SKIPPED_DIRS.intersection(parts)


def _decode(data: bytes) -> str | None:
    if len(data) > _LARGEST_FILE:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _wheel(path: Path) -> Iterator[SourceFile]:
    with zipfile.ZipFile(path) as wheel:
        names = sorted(wheel.namelist())
        about = next(name for name in names if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(wheel.read(about).decode("utf-8"))
        licence = _licence(headers)
        if licence is None:
            print(f"{path.name}: no permissive licence in its metadata, left out", file=sys.stderr)
            return
        source = Source(headers["Name"], headers["Version"], licence)
        for name in filter(_wanted, names):
            if (text := _decode(wheel.read(name))) is not None:
                yield SourceFile(source, name, text)


def _installed(name: str) -> Iterator[SourceFile]:
    distribution = metadata.distribution(name)
    licence = _licence(HeaderParser().parsestr(distribution.read_text("METADATA") or ""))
    if licence is None:
        print(f"{name}: no permissive licence in its metadata, left out", file=sys.stderr)
        return
    source = Source(distribution.metadata["Name"], distribution.version, licence)
    for entry in sorted(map(str, distribution.files or [])):
        if _wanted(entry):
            text = _decode(Path(str(distribution.locate_file(entry))).read_bytes())
            if text is not None:
                yield SourceFile(source, entry, text)


def _standard_library() -> Iterator[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    version = ".".join(map(str, sys.version_info[:3]))
    source = Source("CPython standard library", version, "PSF-2.0")
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _wanted(name) and (text := _decode(path.read_bytes())) is not None:
            yield SourceFile(source, name, text)


def _python_docs(docs: Path) -> Iterator[SourceFile]:
    source = Source("Python documentation", "3.11", "PSF-2.0")
    for path in sorted(docs.rglob("*.rst.txt")):
        if (text := _decode(path.read_bytes())) is not None:
            yield SourceFile(source, path.relative_to(docs).as_posix(), text)
