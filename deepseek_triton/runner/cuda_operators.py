"""Which implementation each operator gets, and what is done to the program before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepseek_triton.runner.cuda_program import Program
from deepseek_triton.runner.cuda_reference import REFERENCE, Operator
from deepseek_triton.runner.cuda_weights import load_weights


@dataclass(frozen=True)
class Prepared:
    """What CudaModel runs."""

    program: Program
    weights: dict[str, Any]
    operators: Mapping[str, Operator]


def prepare(program: Program, device: torch.device, precision: str) -> Prepared:
    """Load the weights of `program` and choose its operators.

    Raises:
        EngineMismatchError: the weights file does not fit the model.
        ConfigError: the weights do not fit the device's memory.
    """
    weights = load_weights(program, device)
    return Prepared(program, weights, REFERENCE)
