"""safetensors files written tensor by tensor (the format of huggingface/safetensors)."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from deepseek_triton.checkpoint.convert import PIECE_BYTES, narrowed
from deepseek_triton.errors import BuildError

_DTYPE_NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
}
_RELEASE_BYTES = 64 << 20  # written between two releases of mapped input pages


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is made when it is written.

    `blocks` hold its elements in C order, in any dtype that converts to `dtype`; read once.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    blocks: Iterable[NDArray[Any]]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def chunks(self) -> Iterator[memoryview]:
        """Yield its bytes.

        Raises ValueError if the blocks do not fill the shape exactly, and BuildError for a value
        that float16 cannot hold.
        """
        limit, written = PIECE_BYTES // self.dtype.itemsize, 0
        for block in self.blocks:
            flat = block.reshape(-1)
            for start in range(0, flat.size, limit):
                chunk = narrowed(self.name, flat[start : start + limit], self.dtype)
                written += chunk.nbytes
                yield chunk.view(np.uint8).data
        if written != self.nbytes:
            raise ValueError(f"{self.name}: blocks hold {written} bytes of {self.nbytes}")


def require_space(folder: Path, nbytes: int) -> None:
    """Raise BuildError if the disk of `folder`, which exists, has no room for `nbytes` more."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise BuildError(
            f"{folder}: {nbytes / 1e9:,.1f} GB are to be written, {free / 1e9:,.1f} GB of the disk "
            "are free; free space or use another disk"
        )


def write_safetensors(
    path: Path,
    tensors: Sequence[LazyTensor],
    release: Callable[[], None],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write one file and flush it to disk; memory stays near one block.

    Calls `release` now and then, so that mapped input does not pile up. Raises OSError.
    """
    entries: dict[str, Any] = {"__metadata__": metadata or {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    unreleased = 0
    # leave=None: below another bar it goes when it is full, else a large model fills the screen.
    bar = tqdm(total=offset, desc=path.name, unit="B", unit_scale=True, disable=None, leave=None)
    with path.open("wb") as file, bar:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            for chunk in tensor.chunks():
                file.write(chunk)
                bar.update(chunk.nbytes)
                unreleased += chunk.nbytes
                if unreleased >= _RELEASE_BYTES:
                    release()
                    unreleased = 0
        release()
        file.flush()
        os.fsync(file.fileno())
