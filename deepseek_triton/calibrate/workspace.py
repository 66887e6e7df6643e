"""The folder in which a quantised checkpoint grows, part by part, and from which a run goes on.

A part (a decoder layer, or the rest) is finished when its record `<part>.json` is there, which is
renamed into place after its weight files are on disk. The folder becomes the checkpoint by rename.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.checkpoint.reader import INDEX_FILE
from deepseek_triton.checkpoint.writer import LazyTensor, write_safetensors
from deepseek_triton.errors import BuildError, ConfigError

FloatFile = np.memmap[Any, np.dtype[np.float32]]
_SETTINGS = "settings.json"
_RECORDS = "records"
_SHARD_BYTES = 1 << 30  # of new tensors that are held in memory


class Workspace:
    """`<out>.partial`, kept if it was begun with the same settings, else begun anew."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        """Raises ConfigError if `out` exists, BuildError if the folder cannot be made."""
        self.out = Path(os.path.abspath(out))
        self.folder = self.out.with_name(f"{self.out.name}.partial")
        if self.out.exists() or self.out.is_symlink():
            raise ConfigError(f"OUT: {out} exists already; remove it or choose another folder")
        try:
            self._begin(json.dumps(settings, indent=1, sort_keys=True) + "\n")
        except OSError as error:
            raise BuildError(f"{self.folder} cannot be written: {error.strerror}") from error

    def record(self, part: str) -> dict[str, Any] | None:
        """Return what `finish` recorded of a part; None if it is not finished."""
        path = self.folder / _RECORDS / f"{part}.json"
        if not path.is_file():
            return None
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return record

    def finish(self, part: str, record: dict[str, Any]) -> None:
        """Record that all files of a part are on disk."""
        write_whole(self.folder / _RECORDS / f"{part}.json", json.dumps(record, indent=1) + "\n")

    def hidden(self, layer: int) -> Path:
        """Return the file of the hidden states [n, S, D] float32 that a layer reads."""
        return self.folder / _RECORDS / f"hidden-{layer}.f32"

    def publish(self, weight_map: dict[str, str], total_bytes: int) -> None:
        """Write the index of the weight files and make the folder the checkpoint."""
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_whole(self.folder / INDEX_FILE, json.dumps(index, indent=1) + "\n")
        self.folder.rename(self.out)  # it is whole; the rest is tidying up
        shutil.rmtree(self.out / _RECORDS)
        (self.out / _SETTINGS).unlink()

    def _begin(self, settings: str) -> None:
        known = self.folder / _SETTINGS
        if self.folder.is_dir() and any(self.folder.iterdir()):
            if not known.is_file():
                raise ConfigError(
                    f"{self.folder} is not of an interrupted run; remove it or choose another OUT"
                )
            if known.read_text(encoding="utf-8") == settings:
                return
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(known, settings)
        (self.folder / _RECORDS).mkdir(exist_ok=True)


class ShardWriter:
    """Writes the tensors of one part into files of bounded size."""

    def __init__(self, folder: Path, part: str, release: Callable[[], None]) -> None:
        self._folder, self._part, self._release = folder, part, release
        self._pending: list[LazyTensor] = []
        self._nbytes = 0
        self.weight_map: dict[str, str] = {}
        self.total_bytes = 0

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Take a tensor; it is written sooner or later."""
        self._pending.append(LazyTensor(name, array.dtype, array.shape, [array]))
        self._nbytes += array.nbytes
        if self._nbytes >= _SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is pending into a file of its own."""
        if not self._pending:
            return
        names = [tensor.name for tensor in self._pending]
        file = f"model-{self._part}-{len(set(self.weight_map.values())) + 1}.safetensors"
        write_safetensors(self._folder / file, self._pending, self._release)
        self.weight_map |= dict.fromkeys(names, file)
        self.total_bytes += self._nbytes
        self._pending, self._nbytes = [], 0


def write_whole(path: Path, text: str) -> None:
    """Write a small file that is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def map_floats(path: Path, shape: tuple[int, ...], *, new: bool = False) -> FloatFile:
    """Map the file `path` of float32 [*shape]: to be read, or made of zeros and to be written.

    Raises OSError, for a full disk too.
    """
    if new:
        # All of its blocks, now: a write to a mapped file that finds the disk full is a SIGBUS.
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 4 * math.prod(shape))
    return np.memmap(path, np.float32, "r+" if new else "r", shape=shape)
