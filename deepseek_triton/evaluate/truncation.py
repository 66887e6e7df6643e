"""Engines whose heads see a part of the context, to learn how much of it each head needs.

A head with a retained length n attends to the most recent n tokens and to the first `sink` ones
(arXiv 2309.17453 found that models rely on those). The engine still computes all of it: what a
kernel that skips the rest would give is measured, not its speed.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from deepseek_triton.build.engine_dir import EngineDir
from deepseek_triton.errors import ConfigError

_MASK = "attention_mask"  # the portable model's name of what is added to every layer's scores
_CLOSED = -1e30  # as in the mask itself


def truncate(engine: EngineDir, folder: Path, retained: NDArray[np.int32], sink: int) -> EngineDir:
    """Write the model of `engine` with shorter contexts into the empty `folder`; return it.

    `retained` [layers, heads] tokens, each at least 1. The weights are hard links. The result has
    no manifest of its own: it is to be loaded here and thrown away. Raises ConfigError for an
    engine that is not of the target onnxruntime, or for lengths that do not fit it.
    """
    spec = engine.manifest.model
    wanted = (spec.num_layers, spec.attention.num_heads)
    if engine.manifest.target != "onnxruntime":
        raise ConfigError(f"{engine.path}: only onnxruntime engines can be truncated")
    if retained.shape != wanted or retained.min() < 1 or sink < 0:
        raise ConfigError(f"retained lengths must be at least 1, for {wanted} layers and heads")
    model = onnx.load_model(engine.model_path, load_external_data=False)
    _shorten(model.graph, retained, sink)
    for file in engine.path.iterdir():
        if file != engine.model_path and file.is_file():
            os.link(file, folder / file.name)
    onnx.save_model(model, folder / engine.manifest.model_file)
    return dataclasses.replace(engine, path=folder)


def _shorten(graph: onnx.GraphProto, retained: NDArray[np.int32], sink: int) -> None:
    """Give every layer's scores a mask of their own, [B, S, H, keys]."""
    layers = [node for node in graph.node if node.op_type == "Add" and _MASK in node.input]
    if len(layers) != len(retained):
        raise ConfigError(f"the model adds its mask {len(layers)} times, not {len(retained)}")

    def constant(name: str, value: NDArray[np.generic]) -> str:
        graph.initializer.append(numpy_helper.from_array(value, f"truncation.{name}"))
        return f"truncation.{name}"

    zero, one = constant("zero", np.int32(0)), constant("one", np.int32(1))  # type: ignore[arg-type]
    axes = constant("axes", np.array([2, 3]))
    closed = constant("closed", np.float32(_CLOSED))  # type: ignore[arg-type]
    first = constant("sink", np.int32(sink))  # type: ignore[arg-type]
    shared = [
        helper.make_node("Shape", [_MASK], ["truncation.keys"], start=3, end=4),
        helper.make_node("Squeeze", ["truncation.keys"], ["truncation.count"]),
        helper.make_node("Cast", ["truncation.count"], ["truncation.end"], to=6),
        helper.make_node("Range", [zero, "truncation.end", one], ["truncation.key"]),
        helper.make_node("Unsqueeze", ["positions", axes], ["truncation.query"]),
        helper.make_node("Sub", ["truncation.query", "truncation.key"], ["truncation.distance"]),
        helper.make_node("Less", ["truncation.key", first], ["truncation.is_sink"]),
    ]
    for layer, node in enumerate(layers):
        name = f"truncation.{layer}"
        lengths = constant(f"{layer}.lengths", retained[layer, :, None].astype(np.int32))
        shared += [
            helper.make_node("Less", ["truncation.distance", lengths], [f"{name}.near"]),
            helper.make_node("Or", [f"{name}.near", "truncation.is_sink"], [f"{name}.kept"]),
            helper.make_node("Where", [f"{name}.kept", _MASK, closed], [f"{name}.mask"]),
        ]
        node.input[list(node.input).index(_MASK)] = f"{name}.mask"
    made = next(i for i, node in enumerate(graph.node) if _MASK in node.output)
    for offset, node in enumerate(shared, start=made + 1):
        graph.node.insert(offset, node)
