"""Values from one number type to another, at the speed of memory, with the bits of NumPy's astype.

NumPy 1.26 and ml_dtypes convert to float16 one value at a time. ONNX Runtime's Cast uses the
processor's instruction for it (F16C), which rounds to nearest, ties to even, subnormals included.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper

from deepseek_triton.errors import BuildError

PIECE_BYTES = 1 << 20
"""Of a result, about what is converted at a time, so that it is still in the cache when written."""

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_NOT_FINITE = {np.dtype(np.float16): 0x7C00, _BFLOAT16: 0x7F80}  # bits of infinity


def converted(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return `values` [n] as a contiguous array of `dtype`: themselves if they are one already.

    What `dtype` cannot hold becomes infinite, without a warning.
    """
    if dtype == np.float16 and values.dtype == _BFLOAT16:
        values = values.astype(np.float32)  # exact
    if dtype == np.float16 and values.dtype == np.float32:
        aligned = np.require(values, requirements=("C", "A"))  # views on a mapped file may not be
        result: NDArray[Any] = _half_cast().run(None, {"x": aligned})[0]
        return result
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, dtype)


def narrowed(name: str, values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return `converted(values, dtype)` of the weight `name`.

    Raises BuildError if a half precision that they do not have already cannot hold one of them, and
    for NaN in float16.
    """
    array = converted(values, dtype)
    limit = _NOT_FINITE.get(dtype)
    if limit is None or not array.size or (dtype == _BFLOAT16 and values.dtype == dtype):
        return array
    if int((array.view(np.uint16) & 0x7FFF).max()) >= limit:
        if np.isnan(array).any():
            raise BuildError(f"{name}: a weight is NaN; the checkpoint is damaged")
        other = "fp16 (65504); build with PRECISION=bf16 or fp32"
        if dtype == _BFLOAT16:
            other = "bf16 (3.39e38); build with PRECISION=fp32"
        raise BuildError(f"{name}: a weight is beyond the range of {other}")
    return array


@cache
def _half_cast() -> ort.InferenceSession:
    """Return a model of one node, x [n] float32 → y [n] float16; any thread may run it."""
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=onnx.TensorProto.FLOAT16)],
        "half",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT16, ["n"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
