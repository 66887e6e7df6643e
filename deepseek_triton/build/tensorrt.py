"""Targets "tensorrt" and "tensorrt_rtx": the portable model compiled into one engine file.

Both are one code path over the modules `tensorrt` and `tensorrt_rtx`. TensorRT compiles for the
GPU of the machine; TensorRT-RTX needs no GPU to compile and finishes the work when it loads one.

Two optimization profiles share the weights: `prefill` for chunks of prompts, `decode` for one token
a row. Sizes are fixed then (CallLimits), but for the number of KV blocks and the width of the block
tables, which are dynamic.
"""

from __future__ import annotations

import importlib
import logging
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from deepseek_triton.build.limits import CallLimits
from deepseek_triton.build.trt_builder import Profile, Range, TensorRTBuild, interruptibly
from deepseek_triton.build.trt_graph import build as build
from deepseek_triton.build.trt_sidecar import write_sidecar
from deepseek_triton.errors import ConfigError

logger = logging.getLogger(__name__)

ENGINE_FILE = "model.engine"
PREFILL, DECODE = "prefill", "decode"  # profiles 0 and 1
_USUAL_BLOCKS = 1024
MAX_ELEMENTS = (1 << 31) - 1  # of one tensor, by TensorRT's 32-bit indices


@dataclass(frozen=True)
class Flavor:
    """One of the two runtimes."""

    module: str
    install: str  # what to do when the module is missing

    def load(self) -> Any:
        """Import the module.

        Raises:
            ConfigError: it is not installed, or only a part of it is.
        """
        try:
            module = importlib.import_module(self.module)
        except Exception as error:  # its stubs and loaders raise anything
            raise ConfigError(
                f"TARGET={self.module} needs the Python module {self.module!r} "
                f"({type(error).__name__}: {error}); {self.install}"
            ) from error
        if not hasattr(module, "Builder"):
            raise ConfigError(
                f"TARGET={self.module}: the Python module {self.module!r} has no builder; "
                + self.install
            )
        return module

    def version(self) -> str:
        """Return the version of the module; raises ConfigError as `load` does."""
        return str(self.load().__version__)


TENSORRT = Flavor(
    "tensorrt",
    "use an NVIDIA container that has TensorRT, such as nvidia/tensorrt or "
    "nvidia/tritonserver:<version>-trtllm-python-py3, on a machine with the GPU",
)
TENSORRT_RTX = Flavor("tensorrt_rtx", "run .venv/bin/pip install -e '.[tensorrt-rtx]'")
FLAVORS = {flavor.module: flavor for flavor in (TENSORRT, TENSORRT_RTX)}


def compile_engine(
    flavor: Flavor, model_path: Path, limits: CallLimits, timing_cache: Path | None
) -> Path:
    """Compile the model that `build` has rewritten; return the engine file, in its place.

    Writes a JSON file that describes the engine beside it, and removes the model and its weights.

    Raises:
        ConfigError: an unknown compute capability, or an option that this runtime does not have.
        BuildError: TensorRT refused the model or failed.
        KeyboardInterrupt: Ctrl-C, once the build has stopped.
    """
    trt = flavor.load()
    _check_options(flavor, limits, timing_cache)
    engine_path = model_path.with_name(ENGINE_FILE)
    profiles = list(_profiles(model_path, limits))

    def work(cancelled: threading.Event) -> None:
        compiler = TensorRTBuild(trt, model_path)
        for profile in profiles:
            compiler.add_profile(profile)
        if limits.compute_capabilities:
            compiler.set_compute_capabilities(limits.compute_capabilities)
        if timing_cache is not None:
            compiler.use_timing_cache(timing_cache)
        compiler.compile(engine_path, cancelled)
        if timing_cache is not None:
            compiler.save_timing_cache(timing_cache)
        write_sidecar(trt, compiler.network, profiles, limits, engine_path)

    interruptibly(work)
    _remove_model(model_path)
    logger.info("compiled %s, %.1f MB", engine_path.name, engine_path.stat().st_size / 1e6)
    return engine_path


def _check_options(flavor: Flavor, limits: CallLimits, timing_cache: Path | None) -> None:
    if flavor is TENSORRT_RTX and timing_cache is not None:
        raise ConfigError("TIMING_CACHE: TensorRT-RTX has none; leave it out")
    if flavor is TENSORRT and limits.compute_capabilities:
        raise ConfigError(
            "SM: TensorRT compiles for the GPU of this machine; leave SM out, or use "
            "TARGET=tensorrt_rtx"
        )


def _profiles(model_path: Path, limits: CallLimits) -> Iterator[Profile]:
    """Yield the profiles of the model's inputs, prefill first."""
    inputs = onnx.load_model(model_path, load_external_data=False).graph.input
    pool = next(value for value in inputs if _dim_names(value)[0] == "num_blocks")
    block_size = int(pool.type.tensor_type.shape.dim[1].dim_value)
    max_table = -(-limits.max_context_len // block_size)
    for name, rows, chunk in (
        (PREFILL, limits.max_prefill_rows, limits.max_chunk_len),
        (DECODE, limits.max_batch_size, 1),
    ):
        sizes = {
            "B": (1, rows, rows),
            "S": (1, chunk, chunk),
            "M": (1, -(-max_table // 4), max_table),
        }
        yield Profile(name, {value.name: _range(value, sizes) for value in inputs})


def _range(value: onnx.ValueInfoProto, sizes: dict[str, tuple[int, int, int]]) -> Range:
    """Return the shapes of one input: of the named sizes, and any number of KV blocks."""
    names = _dim_names(value)
    fixed = [int(dim.dim_value) for dim in value.type.tensor_type.shape.dim]
    most = MAX_ELEMENTS // math.prod(size or 1 for size in fixed)
    sizes = {**sizes, "num_blocks": (1, min(most, _USUAL_BLOCKS), most)}
    by_dim = [sizes[n] if n else (f, f, f) for n, f in zip(names, fixed, strict=True)]
    least, usual, largest = (tuple(shape) for shape in zip(*by_dim, strict=True))
    return least, usual, largest


def _dim_names(value: onnx.ValueInfoProto) -> list[str]:
    """Return the names of the dimensions, "" for fixed ones; the portable model fixes the names."""
    return [str(dim.dim_param) for dim in value.type.tensor_type.shape.dim]


def _remove_model(model_path: Path) -> None:
    """Remove the compiled model and the weight files that it reads."""
    model = onnx.load_model(model_path, load_external_data=False)
    places = {
        entry.value
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    for name in (model_path.name, *places):
        (model_path.parent / name).unlink(missing_ok=True)
