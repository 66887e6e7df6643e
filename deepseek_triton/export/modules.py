"""Modules that every layer is made of: a node of the graph and its weights from the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.checkpoint.reader import Block
from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.export.graph import GraphBuilder
from deepseek_triton.export.int4 import add_int4, same_order
from deepseek_triton.export.weights import TensorReader
from deepseek_triton.quantize.int4 import Int4Linear, common_group_size


class Projection(NamedTuple):
    """One linear layer of the checkpoint, `source`.weight [outputs, inputs] (and `source`.bias)."""

    source: str
    outputs: int
    bias: bool = False


@dataclass(frozen=True)
class ModuleWriter:
    """Appends modules of `spec` to `graph`, reading their weights from `reader`."""

    graph: GraphBuilder
    spec: ModelSpec
    reader: TensorReader

    def rms_norm(self, x: str, name: str, source: str, size: int, epsilon: float) -> str:
        """Append the norm of x [T, size] with the weight `source`.weight; return [T, size]."""
        weight = self.norm_weight(f"{name}.weight", source, size)
        return self.graph.node("deepseek.RMSNorm", [x, weight], name, epsilon=epsilon)

    def norm_weight(self, name: str, source: str, size: int) -> str:
        """Add the weight [size] of a norm and return its name."""
        values = self.reader.require(source + ".weight", (size,))
        return self.graph.weight(name, (size,), self.graph.stored(source + ".weight", [values]))

    def matrix(self, name: str, source: str, shape: tuple[int, int]) -> str:
        """Add the checkpoint's tensor `source` as a weight and return its name."""
        return self.graph.weight(name, shape, self.rows(source, shape))

    def rows(
        self, source: str, shape: tuple[int, int], *, float32: bool = False
    ) -> Iterator[Block]:
        """Yield the rows of the checkpoint's tensor `source` (GraphBuilder.stored)."""
        return self.graph.stored(source, self.reader.blocks(source, shape), float32=float32)

    def linear(
        self,
        x: str,
        name: str,
        inputs: int,
        projections: Sequence[Projection],
        *,
        float32: bool = False,
    ) -> str:
        """Append one linear layer that computes `projections` side by side.

        x [T, inputs] → [T, sum of their outputs]. Their rows follow one another as the checkpoint
        stores them; a projection without a bias gets zeros when another has one. INT4 weights stay
        so unless `float32`; those that cannot share one product are computed one by one.
        """
        layers = [None if float32 else self.reader.int4(p.source) for p in projections]
        int4 = [layer for layer in layers if layer is not None]
        if not int4:
            return self._dense(x, name, inputs, projections, float32)
        group_size = common_group_size(int4)
        if len(int4) == len(layers) and group_size is not None and same_order(int4):
            return self._int4(x, name, int4, group_size, projections)
        parts = [
            self.linear(x, f"{name}.{p.source.rpartition('.')[2]}", inputs, [p])
            for p in projections
        ]
        return self.graph.node("Concat", parts, name, axis=-1)

    def _int4(
        self,
        x: str,
        name: str,
        layers: Sequence[Int4Linear],
        group_size: int,
        projections: Sequence[Projection],
    ) -> str:
        biased = any(p.bias for p in projections)
        order = layers[0].input_order
        if order is not None:
            index = self.graph.constant(f"{name}.input_order", order)
            x = self.graph.node("Gather", [x, index], f"{name}.ordered", axis=1)
        shape = (sum(p.outputs for p in projections), layers[0].shape[1])
        weight = add_int4(self.graph, name, shape, [(layer,) for layer in layers], group_size)
        product = f"{name}.product" if biased else name
        y = self.graph.node(
            "deepseek.LinearInt4",
            [x, *weight],
            product,
            group_size=group_size,
            symmetric=[int(all(layer.symmetric for layer in layers))],
        )
        return self.graph.node("Add", [y, self._bias(name, projections)], name) if biased else y

    def _dense(
        self,
        x: str,
        name: str,
        inputs: int,
        projections: Sequence[Projection],
        float32: bool,
    ) -> str:
        outputs = sum(p.outputs for p in projections)
        rows = chain.from_iterable(
            self.rows(f"{p.source}.weight", (p.outputs, inputs), float32=float32)
            for p in projections
        )
        weight = self.graph.weight(f"{name}.weight", (outputs, inputs), rows, float32=float32)
        if not any(p.bias for p in projections):
            return self.graph.node("deepseek.Linear", [x, weight], name)
        bias = self._bias(name, projections, float32)
        return self.graph.node("deepseek.LinearBias", [x, weight, bias], name)

    def _bias(self, name: str, projections: Sequence[Projection], float32: bool = False) -> str:
        parts: list[Block | NDArray[np.float32]] = []
        for p in projections:
            if p.bias:
                values = self.reader.require(f"{p.source}.bias", (p.outputs,))
                parts += self.graph.stored(f"{p.source}.bias", [values], float32=float32)
            else:
                parts.append(np.zeros(p.outputs, np.float32))
        outputs = sum(p.outputs for p in projections)
        return self.graph.weight(f"{name}.bias", (outputs,), parts, float32=float32)
