"""Number types of an exported model."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import DTypeLike

from deepseek_triton.errors import ConfigError


@dataclass(frozen=True)
class Precision:
    """Type of weights, hidden states and KV rows. Norms, softmax and routing are always float32."""

    name: str
    dtype: DTypeLike
    onnx_type: int  # onnx.TensorProto.DataType


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32", np.float32, onnx.TensorProto.FLOAT),
        Precision("fp16", np.float16, onnx.TensorProto.FLOAT16),
        Precision("bf16", ml_dtypes.bfloat16, onnx.TensorProto.BFLOAT16),
    )
}


def find_precision(name: str) -> Precision:
    """Return the precision called `name`. Raises ConfigError that lists what exists."""
    if name not in PRECISIONS:
        raise ConfigError(f"precision {name!r} is unknown; choose one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]
