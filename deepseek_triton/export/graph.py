"""A graph under construction: nodes, inputs, outputs and weights of the portable model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from deepseek_triton.checkpoint.convert import narrowed
from deepseek_triton.checkpoint.reader import Block
from deepseek_triton.export.functions import DOMAIN, DOMAIN_VERSION, OPSET, functions_used
from deepseek_triton.export.precision import Precision
from deepseek_triton.export.weights import (
    UINT4,
    Blocks,
    WeightFile,
    array_of,
    narrowed_blocks,
    nbytes,
)

IR_VERSION = 10
_INLINE_BYTES = 1024  # smaller constants stay in the model file

Dim = int | str
Outputs = TypeVar("Outputs", bound=tuple[str, ...])


class GraphBuilder:
    """Collects a graph in execution order. A value is named after the node that makes it."""

    def __init__(self, precision: Precision, weights: WeightFile | None = None) -> None:
        """`weights` is a file that another graph fills as well: equal names are one weight."""
        self.precision = precision
        self.weights = weights or WeightFile()
        self._used: set[str] = set()  # names in `weights` that this graph reads
        self._nodes: list[onnx.NodeProto] = []
        self._inline: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, dtype: int, shape: Sequence[Dim]) -> str:
        """Declare a graph input and return its name."""
        self._inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: int, shape: Sequence[Dim]) -> None:
        """Declare the value `name` a graph output."""
        self._outputs.append(helper.make_tensor_value_info(name, dtype, shape))

    def node(self, op: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Append a node with one output and return its value, called `name` too.

        `op` is a standard operator, or `deepseek.X` for a model-local function.
        """
        self._append(op, inputs, [name], name, attributes)
        return name

    def node_with(
        self, op: str, inputs: Sequence[str], name: str, outputs: Outputs, **attributes: Any
    ) -> Outputs:
        """Append a node with several outputs and return them."""
        self._append(op, inputs, outputs, name, attributes)
        return outputs

    def float32(self, x: str, name: str) -> str:
        """Return x as float32: x itself, or a Cast called `name` when the model is narrower."""
        if self.precision.onnx_type == onnx.TensorProto.FLOAT:
            return x
        return self.node("Cast", [x], name, to=onnx.TensorProto.FLOAT)

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Add an initializer that keeps the dtype of `value`; returns its name."""
        return self._add(name, value.shape, value.dtype, [value])

    def weight(
        self,
        name: str,
        shape: Sequence[int],
        blocks: Blocks,
        *,
        float32: bool = False,
    ) -> str:
        """Add an initializer in the model's precision or float32.

        `blocks`, those of a checkpoint's tensors from `stored`, hold its elements in C order; they
        are read when the weight file is written.
        """
        return self._add(name, shape, self._dtype(float32), blocks)

    def stored(self, source: str, blocks: Blocks, *, float32: bool = False) -> Iterator[Block]:
        """Yield `blocks` of the checkpoint's tensor `source` as `weight` takes them.

        A value that its type cannot hold is then an error that names `source`.
        """
        return narrowed_blocks(source, blocks, self._dtype(float32))

    def codes(self, name: str, shape: Sequence[int], blocks: Blocks) -> str:
        """Add an initializer of 4-bit codes; `blocks` hold them one a byte, in C order."""
        return self._add(name, shape, UINT4, blocks)

    def model(self, name: str, weights_file: str) -> onnx.ModelProto:
        """Return the model, its large weights pointing into `weights_file` beside it."""
        graph = helper.make_graph(
            self._nodes,
            name,
            self._inputs,
            self._outputs,
            [*self._inline, *self.weights.tensors(weights_file, self._used)],
        )
        return helper.make_model(
            graph,
            functions=functions_used(self._nodes),
            opset_imports=[
                helper.make_opsetid("", OPSET),
                helper.make_opsetid(DOMAIN, DOMAIN_VERSION),
            ],
            ir_version=IR_VERSION,
            producer_name="deepseek-triton",
        )

    def _dtype(self, float32: bool) -> np.dtype[Any]:
        return np.dtype(np.float32 if float32 else self.precision.dtype)

    def _append(
        self,
        op: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        name: str,
        attributes: dict[str, Any],
    ) -> None:
        domain, _, op_type = op.rpartition(".")
        self._nodes.append(
            helper.make_node(op_type, inputs, outputs, name=name, domain=domain, **attributes)
        )

    def _add(
        self,
        name: str,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        blocks: Blocks,
    ) -> str:
        if nbytes(shape, dtype) < _INLINE_BYTES:
            flat = narrowed(name, np.concatenate([array_of(b).reshape(-1) for b in blocks]), dtype)
            self._inline.append(onnx.numpy_helper.from_array(flat.reshape(shape), name))
        else:
            self._used.add(name)
            if name not in self.weights:
                self.weights.add(name, shape, dtype, blocks)
        return name
