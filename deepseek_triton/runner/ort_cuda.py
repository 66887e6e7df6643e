"""ONNX Runtime's CUDA provider: what it needs, its sessions, its memory.

The wheel onnxruntime-gpu replaces onnxruntime: both are one Python package, so that the second one
installed overwrites files of the first. Its CUDA libraries come from wheels of NVIDIA's.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onnx
import onnxruntime as ort

from deepseek_triton.config import labels
from deepseek_triton.errors import ConfigError, DeepseekTritonError, EngineMismatchError
from deepseek_triton.kv_cache.sizing import available_memory
from deepseek_triton.kv_cache.spec import KVCacheSpec

CUDA, HOST = "cuda", "cpu"
_PROVIDER = "CUDAExecutionProvider"
_WAY_OUT = "run `make setup-onnxruntime-gpu`, or build the engine with PROVIDER=cpu"
_DRIVER = "libcuda.so.1"
_RUNTIME_LIBRARIES = ("libcudart.so.13", "libcudart.so.12")
_MEMORY_ERRORS = ("failed to allocate memory", "out of memory", "bad_alloc")
_ONNX_TYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
}


def check_provider() -> None:
    """Make the CUDA provider ready to load.

    Raises:
        ConfigError: both wheels of ONNX Runtime are installed, the one that is has no CUDA
            provider, or CUDA's libraries or the driver are missing; the message says what to do.
    """
    found = [name for name in ("onnxruntime", "onnxruntime-gpu") if _installed(name)]
    if len(found) > 1:
        raise ConfigError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files; "
            + _WAY_OUT
        )
    if _PROVIDER not in ort.get_available_providers():
        raise ConfigError(
            f"ONNX Runtime {ort.__version__} ({', '.join(found) or 'not from a wheel'}) has no "
            f"{_PROVIDER}: {_WAY_OUT}"
        )
    # It prints what it cannot load, and goes on.
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        ort.preload_dlls(cudnn=False)
    problems = [line for line in printed.getvalue().splitlines() if line.startswith("Failed")]
    if problems:
        raise ConfigError(f"ONNX Runtime's CUDA provider: {'; '.join(problems)}: {_WAY_OUT}")
    try:
        ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise ConfigError(_no_gpu(f"no NVIDIA driver: {error}")) from error


def open_session(model_path: Path, device: str) -> ort.InferenceSession:
    """Load `model_path`, built for CUDA, on "cuda", or on "cpu" to check it without a GPU.

    Raises:
        ConfigError: there is no usable GPU, or it has too little memory.
        EngineMismatchError: ONNX Runtime refuses the model.
    """
    ort.set_default_logger_severity(3)  # it warns of equal slots: unused ones, all in one place
    options = ort.SessionOptions()
    options.inter_op_num_threads = options.intra_op_num_threads = 1  # shapes alone are computed
    options.enable_mem_pattern = False  # shapes change from step to step
    options.log_severity_level = 4
    providers: list[str | tuple[str, dict[str, str]]] = ["CPUExecutionProvider"]
    if device == CUDA:
        check_provider()
        # TF32 would leave 10 bits of a float32 product. Memory grows by what is asked for, or the
        # pools that are sized from what is left would have less.
        settings = {
            "enable_cuda_graph": "1",
            "use_tf32": "0",
            "arena_extend_strategy": "kSameAsRequested",
        }
        providers.insert(0, (_PROVIDER, settings))
    try:
        with memory_named("the model's weights"):
            session = ort.InferenceSession(os.fspath(model_path), options, providers=providers)
    except DeepseekTritonError:
        raise
    except Exception as error:  # ONNX Runtime's own types have no common base of theirs
        if device == CUDA and "cuda" in str(error).lower():
            raise ConfigError(_no_gpu(str(error))) from error
        raise EngineMismatchError(
            f"{model_path}: ONNX Runtime {ort.__version__} cannot load it: {error}"
        ) from error
    if device == CUDA and _PROVIDER not in session.get_providers():
        raise ConfigError(_no_gpu("ONNX Runtime fell back to the CPU"))
    return session


def allocate_pools(
    spec: KVCacheSpec, num_blocks: int | Callable[[int], int], device: str
) -> dict[str, ort.OrtValue]:
    """Return the pools [num_blocks + 1, block_size, width] of all layers by graph input.

    They hold anything: a slot is written or cleared before it is read. `num_blocks` may be a
    function of the bytes that are free. The last block is for padding.

    Raises:
        ConfigError: less memory is free than the pools need.
    """
    free = free_memory(device)
    count = num_blocks(free) if callable(num_blocks) else num_blocks
    if count < 1:
        raise ConfigError(f"num_blocks must be at least 1, not {count}")
    needed = spec.bytes_per_block * (count + 1)
    if 0 < free < needed:
        raise ConfigError(
            f"{count} KV blocks need {needed:,} bytes on {device}, {free:,} are free: lower "
            + labels("kv_cache_num_blocks", "kv_cache_memory_mb", "kv_cache_memory_fraction")
        )
    shape = (count + 1, spec.block_size, spec.width)
    with memory_named(f"{count} KV blocks of {spec.bytes_per_block:,} bytes"):
        return {name: _uninitialized(shape, spec.dtype, device) for name in spec.pool_names}


def free_memory(device: str) -> int:
    """Bytes that may still be allocated on `device`; 0 if it cannot be told.

    On a GPU this counts what the provider's arena holds as taken.
    """
    if device == HOST:
        return available_memory()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    for name in _RUNTIME_LIBRARIES:  # the provider has loaded one of them
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if library.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0:
            return free.value
    return 0


@contextlib.contextmanager
def memory_named(purpose: str) -> Iterator[None]:
    """Turn ONNX Runtime's complaint about memory into ConfigError, which names `purpose`."""
    try:
        yield
    except Exception as error:  # ONNX Runtime's own types have no common base of theirs
        if not any(sign in str(error).lower() for sign in _MEMORY_ERRORS):
            raise
        sizes = ("kv_cache_memory_fraction", "kv_cache_num_blocks")
        raise ConfigError(
            f"the GPU's memory does not suffice for {purpose}: lower "
            f"{labels(*sizes, 'max_tokens_per_step', 'max_batch_size')} ({error})"
        ) from error


def _uninitialized(shape: tuple[int, ...], dtype: str, device: str) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_shape_and_type(shape, _ONNX_TYPES[dtype], device, 0)


def _no_gpu(reason: str) -> str:
    return (
        f"ONNX Runtime's CUDA provider cannot be used ({reason}); check nvidia-smi, and that the "
        f"driver is at least as new as CUDA {getattr(ort, 'cuda_version', '') or '13'}; or build "
        "the engine with PROVIDER=cpu"
    )


def _installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False
