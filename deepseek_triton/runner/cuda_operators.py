"""From a program to a model on a device: which calls it is made of, and what runs each."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from deepseek_triton.runner.cuda_fold import fold_shared_experts
from deepseek_triton.runner.cuda_fusion import fuse
from deepseek_triton.runner.cuda_model import CudaModel
from deepseek_triton.runner.cuda_program import FoldedTensor, Program, StoredTensor
from deepseek_triton.runner.cuda_reference import REFERENCE
from deepseek_triton.runner.cuda_weights import load_weights

_INT64, _UINT4 = 7, 21  # onnx.TensorProto.DataType
Load = Callable[[Program, torch.device, Collection[str]], dict[str, Any]]


def load_model(
    program: Program, device: torch.device, precision: str, load: Load = load_weights
) -> CudaModel:
    """Load the weights of `program` and put kernels behind its calls.

    Kernels run on a GPU, in fp16 and bf16; everything else is plain PyTorch.

    Raises:
        EngineMismatchError: the weights file does not fit the model, or no kernel fits a call.
        ConfigError: the weights do not fit the device's memory.
    """
    from deepseek_triton.runner.cuda_int4 import (
        bind_int4,
        without_symmetric_zero_points,
        zero_point_names,
    )

    if device.type != "cuda" or precision == "fp32":
        program = without_symmetric_zero_points(program)
        return CudaModel(
            program, load(program, device, zero_point_names(program)), REFERENCE, device
        )
    from deepseek_triton.runner.cuda_kernels import KERNELS

    program = without_symmetric_zero_points(fold_shared_experts(fuse(program)))
    weights = load(program, device, zero_point_names(program))
    program = bind_int4(program, weights)
    return CudaModel(program, weights, KERNELS, device)


def load_draft(program: Program, model: CudaModel, precision: str) -> CudaModel:
    """As `load_model`, of the draft model of `model`; weights that both read are loaded once."""

    def load(wanted: Program, device: torch.device, unpacked: Collection[str]) -> dict[str, Any]:
        shared = {
            name: model.weights[name]
            for name, tensor in wanted.tensors.items()
            if _same_bytes(tensor, model.program.tensors.get(name))
        }
        own = {name: t for name, t in wanted.tensors.items() if name not in shared}
        return load_weights(replace(wanted, tensors=own), device, unpacked) | shared

    return load_model(program, model.device, precision, load)


def _same_bytes(
    one: StoredTensor | FoldedTensor, other: StoredTensor | FoldedTensor | None
) -> bool:
    """Whether both are the same part of the weights file, in floating point."""
    if not isinstance(one, StoredTensor) or not isinstance(other, StoredTensor):
        return False
    same = (one.offset, one.nbytes, one.shape) == (other.offset, other.nbytes, other.shape)
    return same and one.nbytes > 0 and one.onnx_type not in (_INT64, _UINT4)
