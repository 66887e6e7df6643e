"""manifest.json: what an engine directory holds and what it was built from and for."""

from __future__ import annotations

import json
from dataclasses import dataclass

from deepseek_triton.build.limits import CallLimits
from deepseek_triton.build.strict_json import StrictJsonError, from_plain, to_plain
from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.errors import EngineMismatchError
from deepseek_triton.kv_cache.spec import KVCacheSpec

FORMAT_VERSION = 5
"""Raised whenever an older engine directory can no longer be loaded."""

MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True)
class FileEntry:
    """One file of the engine directory."""

    name: str  # relative to the engine directory, without folders
    size: int  # bytes
    sha256: str  # hexadecimal; beyond engine_dir.PIECE_BYTES that of the pieces' digests, in order


@dataclass(frozen=True)
class CheckpointOrigin:
    """Which checkpoint the engine was built from."""

    name: str  # the folder's name, for people
    fingerprint: str  # SHA-256 of the small files and of the weight files' names, sizes and times


@dataclass(frozen=True)
class Manifest:
    """Everything that a server must know before it loads the engine."""

    format_version: int
    target: str  # a key of build.targets.TARGETS
    precision: str
    model: ModelSpec
    kv_cache: KVCacheSpec
    max_context_len: int  # tokens, prompt and output together
    opset: int  # of the default ONNX domain
    versions: dict[str, str]  # package → version that built the engine
    checkpoint: CheckpointOrigin
    model_file: str
    draft_file: str | None  # the multi-token-prediction layer, if the engine has drafts
    tokenizer_files: tuple[str, ...]
    files: tuple[FileEntry, ...]  # all but manifest.json, ascending by name
    limits: CallLimits | None = None  # of a compiled engine; None: any call may be run
    int4_accuracy_level: int | None = None  # of ONNX Runtime's INT4 kernels (build/ort_int4.py)
    provider: str | None = None  # of ONNX Runtime: "cpu" or "cuda"; None is "cpu"

    def to_json(self) -> str:
        """Return the manifest as the text of manifest.json."""
        return json.dumps(to_plain(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Parse the text of manifest.json.

        Raises:
            EngineMismatchError: not JSON, another format version, an unknown or missing key or a
                value of the wrong type; the message names the key.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise EngineMismatchError(f"{MANIFEST_NAME}: not valid JSON ({error})") from error
        # First: another version explains every other difference.
        version = data.get("format_version") if isinstance(data, dict) else None
        if version != FORMAT_VERSION:
            raise EngineMismatchError(
                f"{MANIFEST_NAME}: format_version is {version!r}, "
                f"this version of deepseek-triton reads {FORMAT_VERSION}"
            )
        try:
            return from_plain(Manifest, data)
        except StrictJsonError as error:
            raise EngineMismatchError(f"{MANIFEST_NAME}: {error}") from error
