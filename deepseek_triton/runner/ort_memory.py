"""How much memory ONNX Runtime's CPU provider takes for an engine's weights, known before it does.

    half precision                        widened to float32 while the model is loaded
    float32 that Gather or MoE reads      stays in the mapped file, which memory need not hold
    all else                              packed for the kernels: as many bytes as in the file

Of DeepSeek-V2-Lite's form, three layers took a process 1.42 GB in float32 and 6.74 in float16 (7.58
on the way), and all 27 in INT4 9.02; by this count they are 1.41, 6.68 and 8.52.
"""

from __future__ import annotations

import math
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import helper

from deepseek_triton.build.engine_dir import EngineDir
from deepseek_triton.errors import EngineMismatchError
from deepseek_triton.kv_cache.sizing import available_memory

_HALF = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_READ_FROM_FILE = {"Gather", "MoE"}


def memory_for_weights(engine: EngineDir) -> int:
    """Return the bytes that loading takes at least; 0 for an engine that the CPU does not run."""
    manifest = engine.manifest
    if manifest.target != "onnxruntime" or manifest.provider == "cuda":
        return 0
    names = (manifest.model_file, manifest.draft_file)
    return sum(_of_model(engine.path / name) for name in names if name is not None)


def require_memory(engine: EngineDir) -> None:
    """Raise EngineMismatchError if the weights of `engine` cannot be in this machine's memory.

    Without it the kernel would end the process that loads them, which can say nothing any more.
    """
    needed, available = memory_for_weights(engine), available_memory()
    if 0 < available < needed:
        wide = engine.manifest.precision in ("fp16", "bf16")
        why = ", which the CPU's kernels want in float32," if wide else ""
        raise EngineMismatchError(
            f"engine directory {engine.path}: its weights{why} take {needed / 1e9:,.1f} GB of "
            f"memory, {available / 1e9:,.1f} GB are available; free memory, use a larger machine, "
            "or build a smaller engine: make quantize, then make engine"
        )


def _of_model(path: Path) -> int:
    try:
        graph = onnx.load_model(path, load_external_data=False).graph
    except DecodeError:
        return 0  # whoever loads it says that it is damaged
    readers: dict[str, set[str]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    total = 0
    for tensor in graph.initializer:
        kind, count = tensor.data_type, math.prod(tensor.dims)
        if kind == onnx.TensorProto.FLOAT and readers.get(tensor.name, set()) <= _READ_FROM_FILE:
            continue
        size = 4 if kind in _HALF else helper.tensor_dtype_to_np_dtype(kind).itemsize
        total += count * size
    return total
