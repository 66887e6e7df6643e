"""One decoder layer of the portable ONNX model, run in float32 on ONNX Runtime.

The graph is the exporter's own. Of a layer with experts everything but the experts is kept: they
run one at a time elsewhere, so that a layer of hundreds needs no more memory than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from deepseek_triton.checkpoint.names import EMBEDDING
from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.export.attention import pool_inputs
from deepseek_triton.export.decoder import decoder_layer, step_values
from deepseek_triton.export.graph import GraphBuilder
from deepseek_triton.export.modules import ModuleWriter
from deepseek_triton.export.precision import find_precision
from deepseek_triton.export.weights import TensorReader, WeightFile

_BLOCK_SIZE = 1  # of the pool that the graph asks for; nothing is cached here
Values = dict[str, NDArray[Any]]


def embed(spec: ModelSpec, reader: TensorReader, ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the embedding [n, D] of `ids` [n]."""
    table = reader.require(EMBEDDING, (spec.vocab_size, spec.hidden_size))
    return np.asarray(table[ids], np.float32)


class LayerModel:
    """Decoder layer `layer`, over one window at a time from position 0."""

    def __init__(
        self, spec: ModelSpec, reader: TensorReader, layer: int, values: Sequence[str]
    ) -> None:
        """Read the layer's weights but the experts' into memory, as float32.

        `values` are those of the graph that `run` returns besides the output.
        """
        graph = GraphBuilder(find_precision("fp32"))
        modules = ModuleWriter(graph, spec, reader)
        hidden = graph.input("hidden", onnx.TensorProto.FLOAT, ("T", spec.hidden_size))
        step = step_values(graph, spec, _BLOCK_SIZE)
        pool_inputs(graph, spec, layer, _BLOCK_SIZE)
        output = decoder_layer(modules, layer, hidden, step)
        model = graph.model("layer", "")
        made = {name for node in model.graph.node for name in node.output}
        self._parts = [output]
        if spec.moe is not None and layer in spec.moe_layers:
            shared = f"layers.{layer}.mlp.shared.down"
            self._parts = [f"layers.{layer}.attention_residual", *({shared} & made)]
        self._outputs = list(dict.fromkeys((*self._parts, *values)))
        self._values = tuple(values)
        empty = np.zeros((1, _BLOCK_SIZE, spec.attention.pool_width), np.float32)
        self._pools = {f"{pool}_pool.{layer}": empty for pool in spec.attention.pools}
        _keep_only(model.graph, self._outputs)
        self._session = _open(model, graph.weights)

    def run(self, hidden: NDArray[np.float32]) -> tuple[NDArray[np.float32], Values]:
        """Run the layer over one window `hidden` [S, D].

        Returns its output [S, D], to which the routed experts' is still to be added if it has any,
        and the values of the graph that were asked for.
        """
        feeds = {
            "hidden": hidden,
            "positions": np.arange(len(hidden), dtype=np.int32)[None],
            "context_lens": np.zeros(1, np.int32),
            "block_tables": np.zeros((1, 1), np.int32),
            **self._pools,
        }
        results = dict(zip(self._outputs, self._session.run(self._outputs, feeds), strict=True))
        output = results[self._parts[0]]
        for part in self._parts[1:]:
            output = output + results[part]
        return output, {name: results[name] for name in self._values}


def _keep_only(graph: onnx.GraphProto, outputs: Sequence[str]) -> None:
    """Make `outputs` the outputs of `graph`, and drop what they do not need."""
    needed, kept = set(outputs), []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    tensors = [tensor for tensor in graph.initializer if tensor.name in needed]
    for field, values in (
        (graph.node, kept[::-1]),
        (graph.initializer, tensors),
        (graph.output, [onnx.ValueInfoProto(name=name) for name in outputs]),
    ):
        del field[:]
        field.extend(values)


def _open(model: onnx.ModelProto, weights: WeightFile) -> ort.InferenceSession:
    """Open `model` with its external weights taken from memory."""
    external = onnx.TensorProto.EXTERNAL
    names = [t.name for t in model.graph.initializer if t.data_location == external]
    values = [ort.OrtValue.ortvalue_from_numpy(weights.read(name)) for name in names]
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_external_initializers(names, values)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
