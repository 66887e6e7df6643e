"""Which implementation each operator gets, and what is done to the program before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deepseek_triton.runner.cuda_fold import fold_shared_experts
from deepseek_triton.runner.cuda_fusion import fuse
from deepseek_triton.runner.cuda_program import Program
from deepseek_triton.runner.cuda_reference import REFERENCE, Operator


@dataclass(frozen=True)
class Prepared:
    """A program and what runs it."""

    program: Program
    operators: Mapping[str, Operator]


def prepare(program: Program, device: torch.device, precision: str) -> Prepared:
    """Choose kernels where there are some: on a GPU, for fp16 and bf16; else plain PyTorch."""
    if device.type != "cuda" or precision == "fp32":
        return Prepared(program, REFERENCE)
    from deepseek_triton.runner.cuda_kernels import KERNELS

    return Prepared(fold_shared_experts(fuse(program)), KERNELS)
