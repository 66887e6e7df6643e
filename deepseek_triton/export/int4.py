"""INT4 weights of the portable model: codes, scales and zero points as initializers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.checkpoint.reader import Block
from deepseek_triton.export.graph import GraphBuilder
from deepseek_triton.quantize.int4 import SYMMETRIC_ZERO, Int4Linear

_Block = tuple[Int4Linear, ...]


def same_order(layers: Sequence[Int4Linear]) -> bool:
    """Whether the codes' columns of all `layers` multiply the same inputs."""
    first, *others = (
        np.arange(layer.shape[1]) if layer.input_order is None else layer.input_order
        for layer in layers
    )
    return all(np.array_equal(first, order) for order in others)


def add_int4(
    graph: GraphBuilder, name: str, shape: Sequence[int], blocks: Sequence[_Block], group_size: int
) -> list[str]:
    """Add the INT4 weight `name` […, N, K]; return the names of codes, scales and zero points.

    `blocks` hold its rows: a block of one layer those of the layer, a block of several their rows
    in turn. Scales are in the model's precision; zero points are 8 where a layer has none. All is
    read when the weight file is written, a block at a time.
    """
    parts = [tuple(layer.with_groups_of(group_size) for layer in block) for block in blocks]
    per_group = (*shape[:-1], -(-shape[-1] // group_size))
    return [
        graph.codes(f"{name}.codes", shape, _rows(parts, lambda layer: layer.codes())),
        graph.weight(f"{name}.scales", per_group, _scales(graph, parts)),
        graph.codes(f"{name}.zero_points", per_group, _rows(parts, _zero_points)),
    ]


def _scales(graph: GraphBuilder, blocks: Sequence[_Block]) -> Iterator[Block]:
    for block in blocks:
        parts = [stored for layer in block for stored in graph.stored(layer.name, [layer.scales])]
        yield partial(_stacked, parts)


def _rows(blocks: Sequence[_Block], read: Callable[[Int4Linear], NDArray[Any]]) -> Iterator[Block]:
    for block in blocks:
        yield partial(_read, block, read)


def _read(block: _Block, read: Callable[[Int4Linear], NDArray[Any]]) -> NDArray[Any]:
    return _stacked([partial(read, layer) for layer in block])


def _stacked(parts: Sequence[Block]) -> NDArray[Any]:
    arrays = [part() for part in parts]
    return arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=1)


def _zero_points(layer: Int4Linear) -> NDArray[np.uint8]:
    zeros = layer.zero_points()
    if zeros is not None:
        return zeros
    rows, columns = layer.shape
    return np.full((rows, -(-columns // layer.group_size)), SYMMETRIC_ZERO, np.uint8)
