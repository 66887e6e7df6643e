"""The engine directory on disk: it appears whole, by rename, and is verified whole at load."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from pathlib import Path

from tqdm import tqdm

from deepseek_triton.build.manifest import FORMAT_VERSION, MANIFEST_NAME, FileEntry, Manifest
from deepseek_triton.checkpoint.temporary import temporary_sibling
from deepseek_triton.errors import BuildError, EngineMismatchError

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""What one core hashes at a time (FileEntry.sha256)."""

_READ_BYTES = 1 << 20
_MAX_HASHERS = 32
_REBUILT_WITH = {
    "TARGET": "target",
    "PRECISION": "precision",
    "PROVIDER": "provider",
    "INT4_ACCURACY": "int4_accuracy_level",
}
_PLAIN_WORD = re.compile("[a-z0-9_]+")
_SLOW_BYTES = 2 << 30  # hashing more than this takes seconds: show a bar


@dataclass(frozen=True)
class EngineDir:
    """A verified engine directory."""

    path: Path
    manifest: Manifest

    @property
    def model_path(self) -> Path:
        """The model file that the target's runner loads."""
        return self.path / self.manifest.model_file


@contextmanager
def create_engine_dir(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; make it `path`, durably, when the block ends well.

    An engine directory already at `path` is replaced only then. If the block raises (Ctrl-C
    included), the sibling is removed and `path` stays as it was. So are those of builds that were
    killed.

    Raises:
        BuildError: the parent cannot be written, the disk is full, or `path` is something else
            than an engine directory.
    """
    path = Path(os.path.abspath(path))
    _refuse_foreign(path)
    try:
        with temporary_sibling(path) as temporary:
            yield temporary
            _sync_tree(temporary)
            _rename_over(temporary, path)
    except OSError as error:
        raise BuildError(_write_problem(path, error)) from error


def describe_files(folder: Path) -> tuple[FileEntry, ...]:
    """Return size and SHA-256 of each file in `folder`, ascending by name.

    The files are flushed to the disk meanwhile, which needs no core. Raises OSError.
    """
    paths = sorted(p for p in folder.iterdir() if p.name != MANIFEST_NAME)
    with ThreadPoolExecutor(1) as flusher:
        flushed = flusher.map(_sync, paths)
        digests = _sha256_of(paths)
        list(flushed)  # raises what went wrong
    return tuple(FileEntry(p.name, p.stat().st_size, digests[p.name]) for p in paths)


def load_engine_dir(
    path: Path, *, target: str | None = None, verify_contents: bool = True
) -> EngineDir:
    """Read the manifest of `path` and check that its files are those that were built.

    Presence and sizes are always checked. SHA-256 of every file is compared unless
    `verify_contents` is false, which is for readers of the manifest and the tokenizer alone: the
    hash reads 1-2 GB/s on each core, no slower than a disk, and a bit flipped on the disk leaves
    size and time of the file as they were, so no cheaper stamp would see it.

    Raises:
        EngineMismatchError: no engine directory, another format or target, a missing or changed
            file; the message names the file and says what to rebuild.
    """
    path = Path(path)
    try:
        manifest = Manifest.from_json((path / MANIFEST_NAME).read_text(encoding="utf-8"))
        other_target = target is not None and manifest.target != target
        if not other_target:
            _check_sizes(path, manifest)
            if verify_contents:
                _check_contents(path, manifest)
    except PermissionError as error:
        raise EngineMismatchError(
            f"engine directory {path}: {error.filename} cannot be read (permission denied); let "
            "the user that runs the server read the folder and its files"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        if not (path / MANIFEST_NAME).exists():
            raise EngineMismatchError(_no_manifest(path)) from error
        raise EngineMismatchError(_unusable(path, error)) from error
    except EngineMismatchError as error:
        raise EngineMismatchError(_unusable(path, error)) from error
    if other_target:
        problem = f"built for {manifest.target!r}, {target!r} is needed"
        raise EngineMismatchError(mismatch(path, problem))
    return EngineDir(path, manifest)


def mismatch(path: Path, problem: str) -> str:
    """Return the message for an engine directory that cannot be used because of `problem`."""
    return f"engine directory {path}: {problem}; {_rebuild(path)}"


def _rebuild(path: Path) -> str:
    return f"rebuild it: make engine CHECKPOINT=<checkpoint folder> ENGINE={path}"


def _unusable(path: Path, error: Exception) -> str:
    return f"engine directory {path}: {error}; {way_out(path)}"


def way_out(path: Path) -> str:
    """Return what to do about an engine directory that cannot be read, as its manifest allows.

    That is to build it again the way it was built, or, if a later version built it, to update.
    """
    try:
        found = json.loads((path / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    given = found if isinstance(found, dict) else {}
    version = given.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        return "a later version of deepseek-triton built it: update this one"
    # A file that may have been tampered with says what somebody is to type: plain words alone.
    words = {name: str(given.get(key)) for name, key in _REBUILT_WITH.items() if key in given}
    settings = [f" {name}={word}" for name, word in words.items() if _PLAIN_WORD.fullmatch(word)]
    drafts = " DRAFT=mtp" if given.get("draft_file") else ""
    return _rebuild(path) + "".join(settings) + drafts


def _check_sizes(path: Path, manifest: Manifest) -> None:
    for entry in manifest.files:
        if os.path.basename(entry.name) != entry.name:
            raise EngineMismatchError(f"{MANIFEST_NAME}: files: {entry.name!r} has a folder part")
        if not (path / entry.name).is_file():
            raise EngineMismatchError(f"{entry.name} is missing")
        size = (path / entry.name).stat().st_size
        if size != entry.size:
            raise EngineMismatchError(
                f"{entry.name} has {size} bytes, the manifest says {entry.size}: "
                "the file is truncated or was replaced"
            )
    listed = {entry.name for entry in manifest.files}
    for name in (manifest.model_file, *manifest.tokenizer_files):
        if name not in listed:
            raise EngineMismatchError(f"{MANIFEST_NAME}: files: {name!r} is not listed")


def _check_contents(path: Path, manifest: Manifest) -> None:
    digests = _sha256_of([path / entry.name for entry in manifest.files])
    for entry in manifest.files:
        if digests[entry.name] != entry.sha256:
            raise EngineMismatchError(f"{entry.name} changed since it was built (SHA-256 differs)")


def _sha256_of(paths: list[Path]) -> dict[str, str]:
    """Return each file's digest as FileEntry.sha256 defines it, hashing pieces on all cores."""
    pieces = [
        (path, start)
        for path in paths
        for start in range(0, max(1, path.stat().st_size), PIECE_BYTES)
    ]
    total = sum(p.stat().st_size for p in paths)
    quiet = True if total < _SLOW_BYTES else None  # None: a bar if stderr is a terminal
    found: dict[Path, list[bytes]] = {path: [] for path in paths}
    with (
        tqdm(total=total, desc="checksums", unit="B", unit_scale=True, disable=quiet) as bar,
        ThreadPoolExecutor(min(_MAX_HASHERS, os.cpu_count() or 1)) as hashers,
    ):
        digests = hashers.map(lambda p: _sha256_of_piece(p[0], p[1], bar.update), pieces)
        for (path, _), digest in zip(pieces, digests, strict=True):
            found[path].append(digest)
    return {path.name: _joined(parts).hex() for path, parts in found.items()}


def _sha256_of_piece(path: Path, start: int, advance: Callable[[int], object]) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = PIECE_BYTES
        while left and (chunk := file.read(min(_READ_BYTES, left))):
            digest.update(chunk)
            advance(len(chunk))
            left -= len(chunk)
    return digest.digest()


def _joined(parts: list[bytes]) -> bytes:
    return parts[0] if len(parts) == 1 else hashlib.sha256(b"".join(parts)).digest()


def _refuse_foreign(path: Path) -> None:
    """A folder that is replaced is deleted, so it has to be one of ours."""
    try:
        if path.is_dir():
            foreign = any(path.iterdir()) and not (path / MANIFEST_NAME).is_file()
        else:
            foreign = path.is_symlink() or path.exists()
    except OSError as error:
        raise BuildError(_write_problem(path, error)) from error
    if foreign or path.is_symlink():
        raise BuildError(
            f"{path} exists and is not an engine directory: choose another ENGINE or remove it"
        )


def _rename_over(temporary: Path, path: Path) -> None:
    """Put `temporary` at `path`; on failure what was at `path` is back there."""
    if not path.exists():
        temporary.rename(path)
    else:
        old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old-", dir=path.parent))
        path.rename(old)
        try:
            temporary.rename(path)
        except BaseException:
            old.rename(path)
            raise
        shutil.rmtree(old, ignore_errors=True)
    _sync(path.parent)


def _sync_tree(folder: Path) -> None:
    for file in folder.iterdir():
        _sync(file)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_problem(path: Path, error: OSError) -> str:
    if error.errno in (ENOSPC, EDQUOT):
        return f"cannot write engine directory {path}: the disk is full; free space or move ENGINE"
    if isinstance(error, FileNotFoundError):  # /proc and the like say so
        return f"cannot write engine directory {path}: no folder can be made in {path.parent}"
    where = f" ({error.filename})" if error.filename else ""
    return f"cannot write engine directory {path}: {error.strerror or error}{where}"


def _no_manifest(path: Path) -> str:
    """Say what is at `path` instead of an engine directory, and how to get one.

    A folder of other files is never built over, so another name is asked for.
    """
    if not path.exists():
        return (
            f"engine directory {path}: no such folder; build it: "
            f"make engine CHECKPOINT=<checkpoint folder> ENGINE={path}"
        )
    if (path / "config.json").is_file():
        return (
            f"{path} is a checkpoint, no engine directory; build its engine: "
            f"make engine CHECKPOINT={path} ENGINE=<new folder>"
        )
    return (
        f"{path} is no engine directory: no {MANIFEST_NAME} there; build one: "
        "make engine CHECKPOINT=<checkpoint folder> ENGINE=<new folder>"
    )
