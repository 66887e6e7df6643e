"""A floating-point checkpoint to an INT4 one in compressed-tensors' form, layer by layer.

Hidden states of the calibration windows go from layer to layer through files, those of the float
model: a layer is calibrated with what it was trained on, and a run can go on where one stopped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from deepseek_triton.build.pipeline import TOKENIZER_FILES, describe_checkpoint
from deepseek_triton.calibrate.groups import Folding, linear_modules
from deepseek_triton.calibrate.layer_model import embed
from deepseek_triton.calibrate.layer_quantizer import LayerQuantizer
from deepseek_triton.calibrate.workspace import ShardWriter, Workspace, map_floats, write_whole
from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.fields import read_json_object
from deepseek_triton.checkpoint.names import EMBEDDING, validate_checkpoint
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.checkpoint.writer import require_space
from deepseek_triton.errors import BuildError, ConfigError
from deepseek_triton.quantize.awq_search import Scheme
from deepseek_triton.quantize.checkpoint import open_checkpoint
from deepseek_triton.quantize.pack import packed_nbytes, packed_tensors, quantization_config
from deepseek_triton.text.documents import token_stream
from deepseek_triton.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

METHODS = ("awq", "rtn")
GROUP_SIZES = (32, 64, 128)
_CONFIG_FILE = "config.json"
REPORT_FILE = "quantization_report.json"
_REST = "rest"  # the part with embedding, final norm, output layer, multi-token prediction
_ROUTER = ".mlp.gate.weight"
_RECIPE = 1  # raise it when the same settings give other weights


@dataclass(frozen=True)
class QuantizeOptions:
    """What to make of a checkpoint."""

    method: Literal["awq", "rtn"] = "awq"
    group_size: int = 128
    symmetric: bool = False
    num_windows: int = 64  # of calibration text
    window: int = 512  # tokens in each

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"METHOD: {self.method!r} is not one of {', '.join(METHODS)}")
        if self.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise ConfigError(f"GROUP: {self.group_size} is not one of {sizes}")
        for name, value in (("windows", self.num_windows), ("window length", self.window)):
            if value < 1:
                raise ConfigError(f"{name}: must be at least 1, not {value}")


def quantize_checkpoint(
    checkpoint_dir: Path, out: Path, options: QuantizeOptions, documents: Iterable[str]
) -> dict[str, Any]:
    """Write the checkpoint at `checkpoint_dir` to the new folder `out` with INT4 linear layers.

    FP8 checkpoints are read as what they stand for. `documents` are the calibration text;
    round-to-nearest reads none of it. Returns the report,
    which is in the folder too. Interrupted, the run leaves `<out>.partial`, from which the same
    call goes on. The same arguments give the same bytes on one machine.

    Raises CheckpointError for a checkpoint that cannot be read, ConfigError for one that is
    quantised already, a text that is too short or an `out` that exists, BuildError when `out`
    cannot be written.
    """
    config = read_json_object(checkpoint_dir / _CONFIG_FILE)
    spec = read_model_spec(checkpoint_dir)
    reader = open_checkpoint(checkpoint_dir, spec)
    if reader.int4_group_size() is not None:
        raise ConfigError(f"{checkpoint_dir}: INT4 already; give the original checkpoint")
    validate_checkpoint(reader, spec)
    windows = np.zeros((0, options.window), np.int32)
    if options.method == "awq":
        windows = _calibration_windows(checkpoint_dir, spec, options, documents)
    settings = {
        "recipe": _RECIPE,
        "checkpoint": describe_checkpoint(checkpoint_dir).fingerprint,
        "options": asdict(options),
        "calibration": hashlib.sha256(windows.tobytes()).hexdigest(),
    }
    workspace = Workspace(out, settings)
    job = _Job(spec, reader, options, workspace)
    try:
        job.run(windows)
        report = _report(job, settings, windows)
        ignore = [*job.ignored(), *report["left_in_floating_point"]]
        config.pop("compression_config", None)
        config["quantization_config"] = quantization_config(
            options.group_size, symmetric=options.symmetric, ignore=ignore
        )
        write_whole(workspace.folder / _CONFIG_FILE, json.dumps(config, indent=1) + "\n")
        write_whole(workspace.folder / REPORT_FILE, json.dumps(report, indent=1) + "\n")
        for name in TOKENIZER_FILES:
            if (checkpoint_dir / name).is_file():
                shutil.copyfile(checkpoint_dir / name, workspace.folder / name)
        records = job.records()
        weight_map = {k: v for record in records for k, v in record["weight_map"].items()}
        workspace.publish(weight_map, sum(record["bytes"] for record in records))
    except OSError as error:
        raise BuildError(
            f"{workspace.folder} cannot be written: {error.strerror or error}; what is finished "
            "stays there, and the same command goes on"
        ) from error
    return report


class _Job:
    """The parts of one run."""

    def __init__(
        self,
        spec: ModelSpec,
        reader: CheckpointReader,
        options: QuantizeOptions,
        workspace: Workspace,
    ) -> None:
        self._spec, self._reader, self._workspace = spec, reader, workspace
        self._calibrated = options.method == "awq"
        self._scheme = Scheme(options.group_size, options.symmetric, reader.dtype(EMBEDDING))
        # Of the files: FP8 weights are presented as the float32 that they stand for.
        self.nbytes = sum(f.stat().st_size for f in {reader.file(name) for name in reader.names()})
        self._by_layer: dict[int, list[str]] = {}  # −1: of no layer
        for name in reader.names():
            match = re.match(r"model\.layers\.(\d+)\.", name)
            self._by_layer.setdefault(int(match[1]) if match else -1, []).append(name)
        layers = range(spec.num_layers)
        self._beyond = sorted(layer for layer in self._by_layer if layer not in (-1, *layers))
        self.modules = [m for layer in layers for m in linear_modules(spec, layer)]

    def run(self, windows: NDArray[np.int32]) -> None:
        """Write every part that is not finished yet; BuildError if the disk has no room."""
        states = 2 * windows.size * self._spec.hidden_size * 4  # of one layer and of the next
        require_space(self._workspace.folder, self.nbytes_left() + states)
        for layer in tqdm(
            range(self._spec.num_layers), desc="quantize", unit="layer", disable=None
        ):
            if self._workspace.record(_part(layer)) is None:
                self._run_layer(layer, windows)
        if self._workspace.record(_REST) is None:
            shards = self._shards(_REST)
            for layer in (-1, *self._beyond):
                for name in self._by_layer.get(layer, []):
                    self._keep(shards, name, Folding())
            self._finish(_REST, shards, [])

    def nbytes_left(self) -> int:
        """Return the bytes of the tensors that parts which are not finished will have."""
        modules, total = set(self.modules), 0
        for layer, names in self._by_layer.items():
            part = _part(layer) if 0 <= layer < self._spec.num_layers else _REST
            if self._workspace.record(part) is None:
                total += sum(self._nbytes_written(name, modules) for name in names)
        return total

    def _nbytes_written(self, name: str, modules: set[str]) -> int:
        shape, scheme = self._reader.shape(name), self._scheme
        if name.removesuffix(".weight") in modules and shape[1] % scheme.group_size == 0:
            return packed_nbytes(
                (shape[0], shape[1]),
                scheme.group_size,
                symmetric=scheme.symmetric,
                scale_itemsize=scheme.scale_dtype.itemsize,
            )
        kept = self._kept_dtype(name, self._reader.dtype(name), len(shape))
        return math.prod(shape) * kept.itemsize

    def records(self) -> list[dict[str, Any]]:
        """Return what is recorded of all parts, in order."""
        parts = [*map(_part, range(self._spec.num_layers)), _REST]
        return [record for part in parts if (record := self._workspace.record(part)) is not None]

    def ignored(self) -> list[str]:
        """Return what is never quantised, as quantization_config names it."""
        beyond = [rf"re:model\.layers\.{layer}\..*" for layer in self._beyond]
        return ["lm_head", r"re:.*\.kv_b_proj$", r"re:.*\.mlp\.gate$", *beyond]

    def _run_layer(self, layer: int, windows: NDArray[np.int32]) -> None:
        quantizer = LayerQuantizer(self._spec, self._reader, layer, self._scheme)
        if self._calibrated:
            shape = (*windows.shape, self._spec.hidden_size)
            if layer == 0:
                self._embed(windows, shape)
            inputs = map_floats(self._workspace.hidden(layer), shape)
            outputs = map_floats(self._workspace.hidden(layer + 1), shape, new=True)
            quantizer.calibrate(inputs, outputs)
            outputs.flush()
        shards, linears, written = self._shards(_part(layer)), [], set()
        for linear in quantizer.linears():
            module = linear.report.name
            for name, array in packed_tensors(
                module, linear.weight, self._scheme.scale_dtype
            ).items():
                shards.add(name, array)
            linears.append(asdict(linear.report))
            written.add(f"{module}.weight")
        for name in self._by_layer[layer]:
            if name not in written:
                self._keep(shards, name, quantizer.folding)
        self._finish(_part(layer), shards, linears)
        self._workspace.hidden(layer).unlink(missing_ok=True)

    def _embed(self, windows: NDArray[np.int32], shape: tuple[int, ...]) -> None:
        hidden = map_floats(self._workspace.hidden(0), shape, new=True)
        for row, window in zip(hidden, windows, strict=True):
            row[:] = embed(self._spec, self._reader, window)

    def _keep(self, shards: ShardWriter, name: str, folding: Folding) -> None:
        """Write a tensor that stays in floating point, with its scales.

        Matrices are kept in the checkpoint's type, but for routers, which are small and choose.
        """
        array = self._reader.read(name)
        if folding.changes(name):
            array = folding.apply(name, array)
        kept = self._kept_dtype(name, array.dtype, array.ndim)
        shards.add(name, array.astype(kept, copy=False))

    def _kept_dtype(self, name: str, dtype: np.dtype[Any], ndim: int) -> np.dtype[Any]:
        narrowed = dtype == np.float32 and ndim == 2 and not name.endswith(_ROUTER)
        return self._scheme.scale_dtype if narrowed else dtype

    def _finish(self, part: str, shards: ShardWriter, linears: list[dict[str, Any]]) -> None:
        shards.flush()
        record = {"weight_map": shards.weight_map, "bytes": shards.total_bytes, "linears": linears}
        self._workspace.finish(part, record)

    def _shards(self, part: str) -> ShardWriter:
        return ShardWriter(self._workspace.folder, part, self._reader.release)


def _part(layer: int) -> str:
    return f"layer-{layer:03}"


def _calibration_windows(
    checkpoint_dir: Path, spec: ModelSpec, options: QuantizeOptions, documents: Iterable[str]
) -> NDArray[np.int32]:
    """Return [num_windows, window] int32."""
    if options.window > spec.max_position_embeddings:
        raise ConfigError(
            f"window length: {options.window} is more than the model's context of "
            f"{spec.max_position_embeddings} tokens"
        )
    needed = options.num_windows * options.window
    tokens = token_stream(Tokenizer.load(checkpoint_dir), documents, needed)
    if len(tokens) < needed:
        raise ConfigError(
            f"CALIBRATION: the text has {len(tokens)} tokens, {needed} are needed: give a longer "
            "one, or fewer or shorter windows"
        )
    return tokens.reshape(options.num_windows, options.window)


def _mixed_experts(modules: Iterable[str], rounded: Collection[str]) -> list[str]:
    """Return what the names of a layer's routed experts begin with, of layers that mix precisions.

    An engine computes all routed experts of a layer in one way: floating point, unless all are INT4
    (export.mlp).
    """
    found: dict[str, set[bool]] = {}
    for module in modules:
        prefix, experts, _ = module.partition(".experts.")
        if experts:
            found.setdefault(prefix + experts, set()).add(module in rounded)
    return [prefix for prefix, kinds in found.items() if len(kinds) > 1]


def _report(job: _Job, settings: dict[str, Any], windows: NDArray[np.int32]) -> dict[str, Any]:
    records = job.records()
    linears = [linear for record in records for linear in record["linears"]]
    found = {linear["name"] for linear in linears}
    unseen = [entry["name"] for entry in linears if not entry["tokens"]] if len(windows) else []
    if unseen:
        logger.warning("%d linear layers of experts saw no token: rounded to nearest", len(unseen))
    return {
        "options": settings["options"],
        "calibration": {"tokens": int(windows.size), "sha256": settings["calibration"]},
        "bytes_before": job.nbytes,
        "bytes_after": sum(record["bytes"] for record in records),
        "left_in_floating_point": [name for name in job.modules if name not in found],
        "widened_by_make_engine": _mixed_experts(job.modules, found),
        "without_tokens": unseen,
        "linears": linears,
    }
