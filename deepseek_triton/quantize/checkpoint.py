"""Any checkpoint that can be read, opened in one way: dense, FP8, INT4, with fused projections."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deepseek_triton.checkpoint.config import find_config
from deepseek_triton.checkpoint.fields import Fields, describe, read_json_object
from deepseek_triton.checkpoint.fp8 import present_fp8
from deepseek_triton.checkpoint.fused import split_fused
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.errors import UnsupportedModelError
from deepseek_triton.quantize.awq_format import present_awq
from deepseek_triton.quantize.compressed_tensors import present_compressed_tensors
from deepseek_triton.quantize.gptq_format import present_gptq

_KEYS = ("quantization_config", "compression_config")
_METHODS: dict[str, Callable[[CheckpointReader, Fields], None]] = {
    "fp8": present_fp8,
    "awq": present_awq,
    "gptq": present_gptq,
    "compressed-tensors": present_compressed_tensors,
}


def open_checkpoint(folder: Path | str, spec: ModelSpec) -> CheckpointReader:
    """Open a Hugging Face checkpoint; every tensor of `spec` then has its usual name and shape.

    config.json's quantization_config says how it is quantised. FP8 weights and split projections
    are computed when they are read; INT4 layers are given by `linear` and `int4` as they are.

    Raises CheckpointError for parts that are missing or do not belong together, and
    UnsupportedModelError for a way of quantising that is not implemented.
    """
    reader = CheckpointReader(folder)
    path = find_config(folder)
    config = Fields(read_json_object(path), str(path))
    for key in _KEYS:
        if config.has(key):
            _present(reader, Fields(config.object(key), f"{path}: {key}"))
            break
    split_fused(reader, spec, config)
    return reader


def _present(reader: CheckpointReader, config: Fields) -> None:
    method = config.optional_string("quant_method")
    if method not in _METHODS:
        raise UnsupportedModelError(
            f"{config.where}: quant_method {describe(method)} is not supported; "
            f"supported are {', '.join(_METHODS)}, and checkpoints that are not quantised"
        )
    bits = config.values.get("bits")
    if method in ("awq", "gptq") and bits != 4:
        raise UnsupportedModelError(
            f"{config.where}: bits {describe(bits)} is not supported, only 4 is"
        )
    _METHODS[method](reader, config)
