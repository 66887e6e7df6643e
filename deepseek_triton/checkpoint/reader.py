"""Tensors of a Hugging Face checkpoint folder, as views on memory-mapped safetensors files.

The safetensors library copies each tensor for NumPy; here nothing is copied, so exporting a model
needs no memory beyond the page cache. File format: 8 bytes little-endian header length, a JSON
header {name: {dtype, shape, data_offsets}}, then the data.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from deepseek_triton.checkpoint.fields import describe, read_json_object
from deepseek_triton.errors import CheckpointError
from deepseek_triton.quantize.int4 import Int4Linear, Int4Weight

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


Block = Callable[[], NDArray[Any]]
"""Some rows of a tensor, to be read or computed by whichever thread calls it."""

_BLOCK_VALUES = 1 << 19  # 2 MB as float32: what is made of them stays in a core's cache


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor, stored or made of stored ones."""

    file: Path  # where it is, or a part of it
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    read: Callable[[], NDArray[Any]]
    blocks: Callable[[int], Iterator[Block]] | None = None  # that many rows each; None: views


@dataclass(frozen=True)
class _Entry:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


def check_scales(name: str, file: Path, scales: NDArray[Any]) -> None:
    """Raise CheckpointError, naming the tensor, unless all of `scales` are finite."""
    bad = np.argwhere(~np.isfinite(scales))
    if len(bad):
        first = tuple(bad[0].tolist())
        raise CheckpointError(
            f"{file}: tensor {name} has {len(bad)} scales that are not finite, the first "
            f"{scales[first]} at {list(first)}; the file is damaged, fetch it again, or the model "
            "overflowed when it was quantised, quantise it anew"
        )


class CheckpointReader:
    """Reads tensors by name from model.safetensors, or from the shards that its index names.

    Opening reads and checks all headers (a few kB a file); a file is mapped when its first tensor
    is read. Raises CheckpointError, naming file and tensor, for anything missing, truncated,
    duplicated or inconsistent.
    """

    def __init__(self, checkpoint_dir: Path | str) -> None:
        self._dir = Path(checkpoint_dir)
        self._maps: dict[Path, mmap.mmap] = {}
        self._tensors: dict[str, CheckpointTensor] = {}
        self._int4: dict[str, Int4Linear] = {}
        if (self._dir / SINGLE_FILE).is_file():
            self._add_file(self._dir / SINGLE_FILE)
        elif (self._dir / INDEX_FILE).is_file():
            self._add_shards(self._dir / INDEX_FILE)
        else:
            raise CheckpointError(_nothing_to_read(self._dir))

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors, in file order."""
        return tuple(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without mapping its file."""
        return self._find(name).shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the NumPy or ml_dtypes type of a tensor without mapping its file."""
        return self._find(name).dtype

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._find(name).file

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor as a read-only view on the mapped file: no bytes are copied.

        The view stays valid as long as it lives, `release` included. It may be unaligned. A tensor
        that was put in place of others (`put`) is an array, computed anew each time.
        """
        return self._find(name).read()

    def require(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return `read(name)` after checking its shape."""
        self._check_shape(name, shape)
        return self.read(name)

    def blocks(self, name: str, shape: tuple[int, ...]) -> Iterator[Block]:
        """Yield the rows of `require(name, shape)` in blocks, whose sizes follow from `shape`."""
        self._check_shape(name, shape)
        tensor = self._find(name)
        if tensor.blocks is None:
            yield from row_blocks(tensor.read())
        else:
            yield from tensor.blocks(_rows_of_a_block(shape))

    def linear(self, source: str, shape: tuple[int, int]) -> NDArray[Any] | Int4Weight:
        """Return the weight [N, K] of the linear layer `source`, as the checkpoint holds it."""
        layer = self._int4.get(source)
        if layer is None:
            return self.require(source + ".weight", shape)
        self._check_shape(source + ".weight", shape)
        return layer.read()

    def int4(self, source: str) -> Int4Linear | None:
        """Return the INT4 weight of the linear layer `source`, unread; None: it is dense."""
        return self._int4.get(source)

    def int4_group_size(self, source: str | None = None) -> int | None:
        """Return the group size of an INT4 layer, of any if no `source` is given; None: dense."""
        layer = next(iter(self._int4.values()), None) if source is None else self.int4(source)
        return None if layer is None else layer.group_size

    def release(self) -> None:
        """Give the pages read so far back to the system; views stay valid and fault them in again.

        Mapped pages count as resident memory of the process although the kernel may drop them.
        """
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def take(self, name: str) -> CheckpointTensor:
        """Remove a tensor from the names and return it, to be part of another (`put`)."""
        tensor = self._find(name)
        del self._tensors[name]
        return tensor

    def put(self, name: str, tensor: CheckpointTensor) -> None:
        """Present `tensor` under `name`. Raises CheckpointError if there is one already."""
        if name in self._tensors:
            raise CheckpointError(f"{tensor.file}: there are two tensors for {name}")
        self._tensors[name] = tensor

    def put_int4(self, source: str, layer: Int4Linear) -> None:
        """Present the INT4 linear layer `source`; `source`.weight reads as its values."""

        def values() -> NDArray[np.float32]:
            return layer.read().dequantize()

        weight = CheckpointTensor(layer.file, np.dtype(np.float32), layer.shape, values)
        self.put(source + ".weight", weight)
        self._int4[source] = layer

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        tensor = self._find(name)
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, "
                f"config.json asks for {list(shape)}"
            )

    def _find(self, name: str) -> CheckpointTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self._dir}: tensor {name} is missing") from None

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            try:
                with file.open("rb") as stream:
                    self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise CheckpointError(f"{file}: cannot be mapped ({error.strerror})") from error
        return self._maps[file]

    def _add_file(self, file: Path) -> None:
        for name, entry in _read_header(file):
            other = self._tensors.get(name)
            if other is not None:
                raise CheckpointError(f"{file}: tensor {name} is in {other.file.name} as well")
            read = partial(self._view, file, entry)
            self._tensors[name] = CheckpointTensor(file, entry.dtype, entry.shape, read)

    def _view(self, file: Path, entry: _Entry) -> NDArray[Any]:
        if math.prod(entry.shape) == 0:  # a file without data cannot be mapped
            return np.empty(entry.shape, entry.dtype)
        return np.ndarray(entry.shape, entry.dtype, buffer=self._map(file), offset=entry.offset)

    def _add_shards(self, index: Path) -> None:
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                f"{index}: weight_map must be an object of tensor names and files"
            )
        for shard in weight_map.values():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise CheckpointError(
                    f"{index}: {describe(shard)} must be the plain name of a file beside the index"
                )
        for shard in dict.fromkeys(weight_map.values()):
            if not (self._dir / shard).is_file():
                raise CheckpointError(
                    f"{self._dir / shard}: not found, but {INDEX_FILE} names it; "
                    "the download may be incomplete"
                )
            self._add_file(self._dir / shard)
        for name, shard in weight_map.items():
            if name not in self._tensors or self._tensors[name].file.name != shard:
                raise CheckpointError(
                    f"{self._dir / shard}: tensor {name} is missing; {INDEX_FILE} places it there"
                )


def row_blocks(values: NDArray[Any]) -> Iterator[Block]:
    """Yield the rows of `values` in blocks of the sizes that CheckpointReader gives them."""
    rows = _rows_of_a_block(values.shape)
    for start in range(0, len(values), rows):
        yield partial(_rows, values, slice(start, start + rows))


def _rows_of_a_block(shape: tuple[int, ...]) -> int:
    return max(1, _BLOCK_VALUES // max(1, math.prod(shape[1:])))


def _rows(values: NDArray[Any], place: slice) -> NDArray[Any]:
    return values[place]


def _nothing_to_read(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: not a folder"
    message = f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} found"
    if any(folder.glob("*.safetensors")):
        return message + f"; the safetensors files there need their {INDEX_FILE}"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        return message + "; convert the PyTorch files to safetensors first"
    return message


def _read_header(file: Path) -> Iterator[tuple[str, _Entry]]:
    """Yield the tensors of one file after checking that they fill it exactly."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            start = 8 + length
            if size < 8 or length > _MAX_HEADER_BYTES or start > size:
                raise CheckpointError(
                    f"{file}: not a safetensors file, or truncated ({size} bytes)"
                )
            entries = json.loads(stream.read(length), object_pairs_hook=_unique)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: broken safetensors header ({error})") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: broken safetensors header (not an object)")
    entries.pop("__metadata__", None)
    tensors = [(name, _parse_entry(file, start, name, entry)) for name, entry in entries.items()]
    _check_layout(file, start, size, tensors)
    yield from tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name that occurs twice; plain JSON parsing would keep the last."""
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} occurs twice")
    return values


def _parse_entry(file: Path, start: int, name: str, entry: Any) -> _Entry:
    where = f"{file}: tensor {name}"
    try:
        dtype_name, shape, (begin, end) = (
            entry["dtype"],
            tuple(entry["shape"]),
            entry["data_offsets"],
        )
        sizes = (*shape, begin, end)
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{where}: broken header entry {describe(entry)}") from error
    if any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 2**63 for n in sizes):
        raise CheckpointError(f"{where}: broken header entry {describe(entry)}")
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise CheckpointError(f"{where}: dtype {describe(dtype_name)} is not supported")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{where}: {end - begin} bytes do not hold {dtype_name} of shape {list(shape)}"
        )
    return _Entry(dtype, shape, start + begin)


def _check_layout(file: Path, start: int, size: int, tensors: list[tuple[str, _Entry]]) -> None:
    position = start
    for name, tensor in sorted(tensors, key=lambda item: item[1].offset):
        nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        if nbytes and tensor.offset != position:
            raise CheckpointError(f"{file}: tensor {name} overlaps another or leaves a gap")
        position += nbytes
    if position != size:
        raise CheckpointError(
            f"{file}: {size} bytes where the header promises {position}; "
            "the file is truncated or damaged, fetch it again"
        )
