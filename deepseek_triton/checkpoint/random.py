"""Checkpoints with random weights, in Hugging Face form: for demos, tests and benchmarks.

The bytes depend on config, seed and dtype alone: weights come from a bit generator whose stream
NumPy guarantees, through exact arithmetic, a tensor at a time and each from a seed of its own.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from deepseek_triton.checkpoint.config import model_spec_from_config
from deepseek_triton.checkpoint.families import FAMILIES
from deepseek_triton.checkpoint.fields import read_json_object
from deepseek_triton.checkpoint.names import EMBEDDING, LM_HEAD, NamedShape, expected_tensors
from deepseek_triton.checkpoint.reader import INDEX_FILE, SINGLE_FILE, CheckpointReader
from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.checkpoint.temporary import temporary_sibling
from deepseek_triton.checkpoint.writer import require_space
from deepseek_triton.errors import CheckpointError, ConfigError, DeepseekTritonError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TOKENIZER_VOCAB_SIZE = 4096
_SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}  # of that tokenizer

WEIGHT_DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "float32": ("F32", np.dtype("<f4")),
    "float16": ("F16", np.dtype("<f2")),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
}

_MARKER = "random_weights"  # the config.json key by which a folder of ours is known again
_RECIPE_VERSION = 1  # raise it when the same seed gives other bytes
_CHUNK = 1 << 16  # values made at a time: 512 kB of random bits


def write_random_checkpoint(
    out: Path | str,
    config: dict[str, Any],
    seed: int = 0,
    *,
    dtype: str = "float32",
    num_shards: int = 1,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint of `config` (a Hugging Face config.json) to the folder `out`; return it.

    Needs a few MB of memory whatever the size. The folder appears complete, by rename. If it exists
    already as the product of the same arguments it is kept; another product of this function is
    replaced when `overwrite` is set; any other folder is never touched (CheckpointError).
    Raises ConfigError for a bad argument, CheckpointError for a bad config or a write error, and
    BuildError before it writes to a disk that has no room.
    """
    path = Path(os.path.abspath(out))
    full_config = _complete_config(config, seed, dtype, num_shards)
    spec = model_spec_from_config(full_config, where="config of the random checkpoint")
    if spec.vocab_size < TOKENIZER_VOCAB_SIZE:
        raise ConfigError(f"vocab_size must be at least {TOKENIZER_VOCAB_SIZE}, for the tokenizer")
    if _exists_already(path, full_config, overwrite):
        return path
    try:
        with temporary_sibling(path) as temporary:
            require_space(path.parent, _total_size(expected_tensors(spec), dtype))
            _write_small_files(temporary, full_config)
            _write_weights(temporary, spec, seed, dtype, num_shards)
            if path.exists():
                shutil.rmtree(path)
            temporary.rename(path)
    except OSError as error:
        reason = error.strerror
        if isinstance(error, FileNotFoundError):  # /proc and the like say so
            reason = f"no folder can be made in {path.parent}"
        raise CheckpointError(
            f"{path}: the folder cannot be written ({reason}); choose another OUT"
        ) from error
    return path


def _complete_config(
    config: dict[str, Any], seed: int, dtype: str, num_shards: int
) -> dict[str, Any]:
    """Return `config` with what loaders need, and with the marker that tells how it was made."""
    if seed < 0:
        raise ConfigError(f"seed must be at least 0, found {seed}")
    if num_shards < 1:
        raise ConfigError(f"num_shards must be at least 1, found {num_shards}")
    if dtype not in WEIGHT_DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; it must be one of {list(WEIGHT_DTYPES)}")
    kind = config.get("model_type")
    family = next((family for name, family in FAMILIES.items() if name == kind), None)
    names = [] if family is None else [family.class_name]
    marker = {"seed": seed, "num_shards": num_shards, "version": _RECIPE_VERSION}
    # The tokenizer is ours and the weights are plain, whatever the published ones were.
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    ours = {"torch_dtype": dtype, **_SPECIAL_IDS, _MARKER: marker}
    return {"architectures": names} | plain | ours


def _exists_already(path: Path, config: dict[str, Any], overwrite: bool) -> bool:
    """Return whether `path` holds this very checkpoint; raise if it may not be replaced."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return False
    try:
        found = read_json_object(path / "config.json")
    except CheckpointError:
        found = {}
    if _MARKER not in found:
        raise CheckpointError(
            f"{path}: exists and was not made by this command; "
            "choose another folder or remove it yourself"
        )
    if found == config and _is_complete(path):
        return True
    if not overwrite:
        raise CheckpointError(
            f"{path}: holds another random checkpoint; "
            "remove it, pass --overwrite or choose another folder"
        )
    return False


def _is_complete(path: Path) -> bool:
    try:
        CheckpointReader(path)
    except DeepseekTritonError:
        return False
    return all((path / name).is_file() for name in TOKENIZER_FILES)


def _total_size(tensors: Iterable[NamedShape], dtype: str) -> int:
    return sum(math.prod(t.shape) * _dtype_of(t, dtype)[1].itemsize for t in tensors)


def _write_small_files(folder: Path, config: dict[str, Any]) -> None:
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {key: config[key] for key in _SPECIAL_IDS})
    data = resources.files("deepseek_triton.checkpoint") / "data"
    for name in TOKENIZER_FILES:
        (folder / name).write_bytes((data / name).read_bytes())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _write_weights(folder: Path, spec: ModelSpec, seed: int, dtype: str, num_shards: int) -> None:
    tensors = list(expected_tensors(spec))
    shards = _split(tensors, min(num_shards, len(tensors)))
    names = [SINGLE_FILE]
    if num_shards > 1:
        count = len(shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        total = _total_size(tensors, dtype)
        weight_map = {
            t.name: name for name, shard in zip(names, shards, strict=True) for t in shard
        }
        _write_json(
            folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    values = sum(math.prod(tensor.shape) for tensor in tensors)
    with tqdm(total=values, unit="param", unit_scale=True, desc="weights", disable=None) as bar:
        for name, shard in zip(names, shards, strict=True):
            with (folder / name).open("wb") as stream:
                stream.write(_header(shard, dtype))
                for tensor in shard:
                    _write_tensor(stream, tensor, seed, dtype)
                    bar.update(math.prod(tensor.shape))


def _split(tensors: list[NamedShape], count: int) -> list[list[NamedShape]]:
    """Cut `tensors` into `count` runs of about the same number of values, none of them empty."""
    total = sum(math.prod(tensor.shape) for tensor in tensors)
    shards: list[list[NamedShape]] = [[]]
    done = 0
    for index, tensor in enumerate(tensors):
        wanted, remaining = count - len(shards), len(tensors) - index
        full = done * count >= total * len(shards)
        if shards[-1] and wanted and (full or remaining == wanted):
            shards.append([])
        shards[-1].append(tensor)
        done += math.prod(tensor.shape)
    return shards


def _dtype_of(tensor: NamedShape, dtype: str) -> tuple[str, np.dtype[Any]]:
    # DeepSeek-V3 keeps this buffer in float32 whatever the weights are.
    exact = tensor.name.endswith("e_score_correction_bias")
    return WEIGHT_DTYPES["float32" if exact else dtype]


def _header(tensors: list[NamedShape], dtype: str) -> bytes:
    """Return the safetensors header: its length, then JSON padded to a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        code, kind = _dtype_of(tensor, dtype)
        end = begin + math.prod(tensor.shape) * kind.itemsize
        entries[tensor.name] = {"dtype": code, "shape": tensor.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(stream: BinaryIO, tensor: NamedShape, seed: int, dtype: str) -> None:
    mean, deviation = _distribution(tensor)
    kind = _dtype_of(tensor, dtype)[1]
    for values in _normal(tensor, seed):
        values *= np.float32(deviation)
        values += np.float32(mean)
        # As bytes: bfloat16 is no type of the buffer protocol.
        stream.write(values.astype(kind, copy=False).view(np.uint8).data)


def _distribution(tensor: NamedShape) -> tuple[float, float]:
    """Return (mean, standard deviation) that keep activations near 1 through any depth.

    Sharp attention and wide logits make the output depend on all of the context and on each layer,
    so that a fault anywhere shows.
    """
    name = tensor.name
    if name.endswith("norm.weight"):
        return 1.0, 0.1
    if name.endswith("e_score_correction_bias"):
        return 0.0, 0.05
    if name.endswith(".bias"):
        return 0.0, 0.1
    if name == EMBEDDING:
        return 0.0, 1.0
    gain = 2.0 if name == LM_HEAD or name.endswith(("q_proj.weight", "q_b_proj.weight")) else 1.0
    return 0.0, gain * tensor.shape[-1] ** -0.5


def _normal(tensor: NamedShape, seed: int) -> Iterator[NDArray[np.float32]]:
    """Yield the tensor's values before scaling, in chunks: mean 0, deviation 1, nearly normal.

    Each is a sum of four 16-bit uniform integers (Irwin-Hall), exact on every machine where the
    logarithms of a true normal generator are not.
    """
    key = zlib.crc32(tensor.name.encode())
    bits = np.random.SFC64(np.random.SeedSequence(seed, spawn_key=(key,)))
    mean = 4 * (2**16 - 1) / 2
    deviation = math.sqrt(4 * (2**32 - 1) / 12)
    remaining = math.prod(tensor.shape)
    while remaining:
        raw = bits.random_raw(min(remaining, _CHUNK))
        remaining -= raw.size
        part = raw.view(np.uint16).reshape(-1, 4).T
        # Adding columns is eight times as fast as a sum over an axis of four.
        total = np.add(part[0], part[1], dtype=np.uint32) + np.add(
            part[2], part[3], dtype=np.uint32
        )
        values = total.astype(np.float32)
        values -= np.float32(mean)
        values *= np.float32(1.0 / deviation)
        yield values
