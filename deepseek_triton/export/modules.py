"""Modules that every layer is made of: a node of the graph and its weights from the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.export.graph import GraphBuilder
from deepseek_triton.export.weights import TensorReader


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
        return self.graph.weight(name, (size,), [self.reader.require(source + ".weight", (size,))])

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
        stores them; a projection without a bias gets zeros when another has one.
        """
        outputs = sum(p.outputs for p in projections)
        rows = [self.reader.require(f"{p.source}.weight", (p.outputs, inputs)) for p in projections]
        weight = self.graph.weight(f"{name}.weight", (outputs, inputs), rows, float32=float32)
        if not any(p.bias for p in projections):
            return self.graph.node("deepseek.Linear", [x, weight], name)
        parts = [
            self.reader.require(f"{p.source}.bias", (p.outputs,))
            if p.bias
            else np.zeros(p.outputs, np.float32)
            for p in projections
        ]
        bias = self.graph.weight(f"{name}.bias", (outputs,), parts, float32=float32)
        return self.graph.node("deepseek.LinearBias", [x, weight, bias], name)
