"""INT4 weights for ONNX Runtime's kernels.

    portable                          rewritten
    LinearInt4                        com.microsoft::MatMulNBits
    ExpertsInt4                       ExpertsInt4Sparse: com.microsoft::QMoE
    codes, zero points UINT4          UINT8, two codes a byte, each row beginning with a byte
    groups of 64, 128                 groups of 32 with equal scales (level 4)
    logits: Linear                    MatMulNBits with 8 bits (level 4)
    w_uk, w_uv of a head: MatMul      MatMulNBits with 8 bits (level 4)

On CUDA groups, scales and the output layer stay as they are: there is no accuracy level, and
activations keep the model's half precision.

The accuracy level is the CPU kernels' own: 0 multiplies in float32; 4 rounds each 32 inputs of a
row to 8 bits first, which is several times faster. At level 4 a token's numbers do not depend on
its company, to the last bit, with groups of 32 alone: the kernels for larger ones compute an odd
row in another way. Smaller groups of activations are also the more accurate. The output layer and
the projections of latent attention, which no checkpoint has in INT4, are then the largest weights
of a step, and 8 bits a group of 32 change them less than rounding their inputs does.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from deepseek_triton.build.graph_passes import drop_unused, replace
from deepseek_triton.build.stored_weights import CHUNK_BYTES, StoredWeights
from deepseek_triton.errors import BuildError
from deepseek_triton.export.functions import DOMAIN
from deepseek_triton.quantize.int4 import pack_nibbles, unpack_nibbles

logger = logging.getLogger(__name__)

ACCURACY_LEVELS = (4, 0)
"""What can be chosen, the default first."""

_FAST = 4
_FAST_GROUP = 32
_EIGHT_BIT_LEVELS = 127  # on either side of 0
_BY_HEAD = re.compile(r"\.w_u[kv]\.\d+$")  # weights of one attention head, [K, N]
_CONTRIB = "com.microsoft"
_UINT8, _FLOAT = onnx.TensorProto.UINT8, onnx.TensorProto.FLOAT


class Int4Rewriter:
    """Rewrites the models of one folder; what they share is rearranged once."""

    def __init__(self, folder: Path, accuracy_level: int | None) -> None:
        """Rewrite for the CPU at an accuracy level, or for CUDA, which has none."""
        self._folder, self._level = folder, accuracy_level
        self._done: dict[str, onnx.TensorProto] = {}
        self._rewritten = False

    def rewrite(self, graph: onnx.GraphProto) -> bool:
        """Turn the INT4 calls of a portable `graph` into ONNX Runtime's; mutates it.

        A graph without any stays as it is, and so does a call whose group size the kernels do not
        take: it is computed by its body, slowly. Returns whether there were any.
        """
        calls = [node for node in graph.node if node.op_type in _CALLS and node.domain == DOMAIN]
        if not calls:
            return False
        self._rewritten = True
        if self._level == _FAST:
            calls += [node for node in graph.node if _is_head(node)]
        if self._level is None:
            _check_cuda(graph, calls)
        weights = _Weights(graph, self._folder, self._done)
        try:
            for node in calls:
                self._replace(node, weights)
        finally:
            weights.close()
        return True

    def narrow_heads(self, graph: onnx.GraphProto) -> None:
        """Give the products by head of latent attention 8-bit weights, at the level for them.

        `graph` is one that `rewrite` changed and whose calls are inlined since; mutates it.
        """
        if self._level != _FAST:
            return
        weights = _Weights(graph, self._folder, self._done)
        try:
            for node in graph.node:
                if node.op_type == "MatMul" and _BY_HEAD.search(node.input[1]):
                    _narrow_by_head(node, weights)
        finally:
            weights.close()
        drop_unused(graph)

    def trim(self, graphs: Iterable[onnx.GraphProto]) -> None:
        """Cut off the end of the weights file that none of the finished `graphs` reads any more."""
        if not self._rewritten:
            return
        ends: dict[str, int] = {}
        for tensor in (tensor for graph in graphs for tensor in graph.initializer):
            place = {entry.key: entry.value for entry in tensor.external_data}
            if place:
                end = int(place["offset"]) + int(place["length"])
                ends[place["location"]] = max(end, ends.get(place["location"], 0))
        for name, end in ends.items():
            os.truncate(self._folder / name, end)

    def _replace(self, node: onnx.NodeProto, weights: _Weights) -> None:
        if node.op_type == "Linear":
            _head(node, weights)
            return
        group_size = helper.get_node_attr_value(node, "group_size")
        if group_size < 16 or group_size & (group_size - 1):
            logger.warning(
                "%s: ONNX Runtime has no kernel for groups of %d: this is slow; quantise with "
                "groups of 32, 64 or 128",
                node.name,
                group_size,
            )
            return
        block_size = min(group_size, _FAST_GROUP) if self._level == _FAST else group_size
        inputs = list(node.input)
        attributes: dict[str, Any]
        if node.op_type == "LinearInt4":
            rows, columns = weights.shape(inputs[1])
            attributes = {"K": columns, "N": rows, "bits": 4}
            domain, op_type = _CONTRIB, "MatMulNBits"
        else:
            attributes = {
                name: helper.get_node_attr_value(node, name) for name in ("num_experts", "top_k")
            }
            domain, op_type = DOMAIN, "ExpertsInt4Sparse"
        symmetric = bool(helper.get_node_attr_value(node, "symmetric")[0])
        for place in range(_CALLS[node.op_type], len(inputs), 3):
            inputs[place : place + 3] = weights.for_kernels(
                inputs[place : place + 3], group_size, block_size, symmetric
            )
        attributes["block_size"] = block_size
        if self._level is not None:
            attributes["accuracy_level"] = self._level
        while not inputs[-1]:
            inputs.pop()
        node.CopyFrom(
            helper.make_node(
                op_type, inputs, list(node.output), name=node.name, domain=domain, **attributes
            )
        )


_CALLS = {"LinearInt4": 1, "ExpertsInt4": 3}
"""Where the first codes, scales and zero points are among a call's inputs."""


def _check_cuda(graph: onnx.GraphProto, calls: Iterable[onnx.NodeProto]) -> None:
    """Raise BuildError for experts that CUDA's kernel does not compute, or computes wrongly.

    On an H200 the one model with an odd number of groups a row and zero points, whose rows then end
    within a byte, gave other numbers (1.31.1).
    """
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in (node for node in calls if node.op_type == "ExpertsInt4"):
        symmetric = bool(helper.get_node_attr_value(node, "symmetric")[0])
        groups = [tensors[node.input[place]].dims[-1] for place in (4, 7)]
        if not symmetric and any(count % 2 for count in groups):
            raise BuildError(
                f"{node.name}: ONNX Runtime's CUDA provider is wrong for INT4 experts with zero "
                f"points and an odd number of groups a row ({groups[0]} and {groups[1]}): quantise "
                "with SYMMETRIC=1 or smaller groups, or build with PROVIDER=cpu"
            )
        if tensors[node.input[4]].data_type == _FLOAT:
            raise BuildError(
                f"{node.name}: ONNX Runtime's CUDA provider has no kernel for INT4 experts in "
                "fp32; build with PRECISION=fp16 or bf16, or with PROVIDER=cpu"
            )


def _is_head(node: onnx.NodeProto) -> bool:
    return node.op_type == "Linear" and "logits" in node.output


def _head(node: onnx.NodeProto, weights: _Weights) -> None:
    rows, columns = weights.shape(node.input[1])
    if columns % _FAST_GROUP:
        return
    x, weight = node.input
    _multiply_by_eight_bits(node, [x, *weights.in_eight_bits(weight)], rows, columns)


def _narrow_by_head(node: onnx.NodeProto, weights: _Weights) -> None:
    x, weight = node.input
    stored = weight if weight in weights else f"{weight}.stored"  # as ort_precision.widen names it
    columns, rows = weights.shape(stored)
    if columns % _FAST_GROUP == 0:
        names = weights.in_eight_bits(stored, by_column=True)
        _multiply_by_eight_bits(node, [x, *names], rows, columns)


def _multiply_by_eight_bits(
    node: onnx.NodeProto, inputs: list[str], rows: int, columns: int
) -> None:
    """Make `node` the product of x with codes [rows, G, 32] and scales [rows, G]."""
    node.CopyFrom(
        helper.make_node(
            "MatMulNBits",
            inputs,
            list(node.output),
            name=node.name,
            domain=_CONTRIB,
            K=columns,
            N=rows,
            bits=8,
            block_size=_FAST_GROUP,
            accuracy_level=_FAST,
        )
    )


class _Weights(StoredWeights):
    """Initializers of one of the folder's models; `done` holds what another one rearranged."""

    def __init__(
        self, graph: onnx.GraphProto, folder: Path, done: dict[str, onnx.TensorProto]
    ) -> None:
        super().__init__(graph, folder)
        self._done = done

    def for_kernels(
        self, names: list[str], group_size: int, block_size: int, symmetric: bool
    ) -> list[str]:
        """Rearrange codes, scales and zero points; return their names, "" for what is not needed.

        A row of codes is whole blocks for MatMulNBits [N, G, block_size/2], K/2 bytes for QMoE.
        """
        codes, scales, zeros = names
        *rows, columns = self.shape(codes)
        blocks, copies = -(-columns // block_size), group_size // block_size
        if len(rows) == 1:
            self._pad_rows(codes, blocks * block_size)
            shape = (*rows, blocks, block_size // 2)
        else:
            shape = (*rows, columns // 2)
        self._as_bytes(codes, shape)
        if copies > 1:
            self._repeat(scales, copies, blocks)
        if symmetric:
            return [codes, scales, ""]
        self._widen_zero_points(zeros, copies, blocks)
        self._as_bytes(zeros, (*rows, -(-blocks // 2)))
        return [codes, scales, zeros]

    def in_eight_bits(self, name: str, *, by_column: bool = False) -> list[str]:
        """Add codes UINT8 [N, G, 32] and scales [N, G] of the float weight `name`; zero is 128.

        The weight is [N, K], or [K, N] with `by_column`.
        """
        shape = self.shape(name)
        rows, columns = reversed(shape) if by_column else shape
        groups = columns // _FAST_GROUP
        names = [f"{name}.codes", f"{name}.scales"]
        if names[0] in self._done:
            for added in names:
                self.add(self._done[added])
            return names
        stored = self.tensor(name)
        dtype = helper.tensor_dtype_to_np_dtype(stored.data_type)
        values = self.data(stored).view(dtype).reshape(shape)
        values = (values.T if by_column else values).reshape(rows, groups, _FAST_GROUP)

        def chunks() -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
            for chunk in _row_chunks(values):
                group = chunk.astype(np.float32)
                scales = np.abs(group).max(axis=-1, keepdims=True) / np.float32(_EIGHT_BIT_LEVELS)
                yield group, np.maximum(scales, np.finfo(np.float32).tiny)

        codes = (np.rint(group / scale + 128).astype(np.uint8) for group, scale in chunks())
        scales = (scale[..., 0] for _, scale in chunks())
        shapes = [(rows, groups, _FAST_GROUP), (rows, groups)]
        for added, new_shape, kind, blocks in zip(
            names, shapes, (_UINT8, _FLOAT), (codes, scales), strict=True
        ):
            tensor = onnx.TensorProto()
            tensor.CopyFrom(stored)
            tensor.name, tensor.data_type = added, kind
            replace(tensor.dims, list(new_shape))
            self.replace_data(tensor, blocks)
            self.add(tensor)
            self._done[added] = tensor
        return names

    def _as_bytes(self, name: str, shape: tuple[int, ...]) -> None:
        self.tensor(name).data_type = _UINT8
        self.reshape(name, shape)

    def _pad_rows(self, name: str, columns: int) -> None:
        """Fill up rows of codes [N, K] to `columns` with zeros."""
        rows, found = self.shape(name)
        if found == columns:
            return
        tensor = self.tensor(name)
        data = self.data(tensor).reshape(rows, found // 2)
        padding = ((0, 0), (0, (columns - found) // 2))
        self.replace_data(tensor, (np.pad(chunk, padding) for chunk in _row_chunks(data)))
        self.reshape(name, (rows, columns))

    def _repeat(self, name: str, copies: int, groups: int) -> None:
        """Repeat each scale […, G] of a row; `groups` of them are left of each row."""
        tensor, shape = self.tensor(name), self.shape(name)
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        data = self.data(tensor).view(dtype).reshape(-1, shape[-1])
        self.replace_data(
            tensor, (np.repeat(chunk, copies, axis=1)[:, :groups] for chunk in _row_chunks(data))
        )
        self.reshape(name, (*shape[:-1], groups))

    def _widen_zero_points(self, name: str, copies: int, groups: int) -> None:
        """Repeat zero points […, G] likewise, and let each row begin with a byte."""
        tensor, shape = self.tensor(name), self.shape(name)
        if copies == 1 and groups % 2 == 0:
            return
        count = math.prod(shape)
        zeros = unpack_nibbles(self.data(tensor))[:count].reshape(-1, shape[-1])

        def chunks() -> Iterator[NDArray[Any]]:
            for chunk in _row_chunks(zeros):
                repeated = np.repeat(chunk, copies, axis=1)[:, :groups]
                yield pack_nibbles(np.pad(repeated, ((0, 0), (0, groups % 2))))

        self.replace_data(tensor, chunks())


def _row_chunks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield rows of `array`, about CHUNK_BYTES at a time once they are float32."""
    step = max(1, CHUNK_BYTES // max(1, 4 * math.prod(array.shape[1:])))
    for start in range(0, len(array), step):
        yield array[start : start + step]
