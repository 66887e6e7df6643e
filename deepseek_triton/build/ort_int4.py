"""INT4 weights for ONNX Runtime's kernels.

    portable                          rewritten
    LinearInt4                        com.microsoft::MatMulNBits
    ExpertsInt4                       ExpertsInt4Sparse: com.microsoft::QMoE
    codes, zero points UINT4          UINT8, two codes a byte, each row beginning with a byte
    larger groups                     groups of 128 with equal scales (level 4)
    logits: Linear                    MatMulNBits with 8 bits (level 4)
    LatentAttention                   LatentAttentionInt8: w_uk and w_uv in 8 bits (level 4)

On CUDA groups, scales and the output layer stay as they are: there is no accuracy level, and
activations keep the model's half precision.

The accuracy level is the CPU kernels' own: 0 multiplies in float32; 4 rounds each group of a row's
inputs to 8 bits first, which is several times faster. The output layer and the projections of
latent attention, which no checkpoint has in INT4, are then the largest weights of a step, and 8
bits change them less than rounding their inputs does.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from deepseek_triton.build.graph_passes import replace
from deepseek_triton.build.ort_even_rows import pad_odd_rows
from deepseek_triton.build.stored_weights import CHUNK_BYTES, StoredWeights
from deepseek_triton.errors import BuildError
from deepseek_triton.export.functions import DOMAIN
from deepseek_triton.quantize.int4 import pack_nibbles, unpack_nibbles

logger = logging.getLogger(__name__)

ACCURACY_LEVELS = (4, 0)
"""What can be chosen, the default first."""

_FAST = 4
_LARGEST_GROUP = 128
_EIGHT_BIT_GROUPS = (64, 32)  # from 128 on a row's bits depend on its company, as in ort_even_rows
_EIGHT_BIT_LEVELS = 127  # on either side of 0
_CONTRIB = "com.microsoft"
_UINT8, _FLOAT = onnx.TensorProto.UINT8, onnx.TensorProto.FLOAT


class Int4Rewriter:
    """Rewrites the models of one folder; what they share is rearranged once."""

    def __init__(self, folder: Path, accuracy_level: int | None) -> None:
        """Rewrite for the CPU at an accuracy level, or for CUDA, which has none."""
        self._folder, self._level = folder, accuracy_level
        self._done: dict[str, onnx.TensorProto] = {}
        self._rewritten = False

    def rewrite(self, graph: onnx.GraphProto) -> None:
        """Turn the INT4 calls of a portable `graph` into ONNX Runtime's; mutates it.

        A graph without any stays as it is, and so does a call whose group size the kernels do not
        take: it is computed by its body, slowly.
        """
        calls = [node for node in graph.node if node.op_type in _CALLS and node.domain == DOMAIN]
        if not calls:
            return
        self._rewritten = True
        if self._level == _FAST:
            calls += [n for n in graph.node if _is_head(n) or n.op_type == "LatentAttention"]
        if self._level is None:
            _check_cuda(graph, calls)
        weights = _Weights(graph, self._folder, self._done)
        try:
            for node in calls:
                self._replace(node, weights)
        finally:
            weights.close()
        if self._level == _FAST:
            pad_odd_rows(graph)

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
        if node.op_type == "LatentAttention":
            _attention(node, weights)
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
        block_size = min(group_size, _LARGEST_GROUP) if self._level == _FAST else group_size
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
    x, weight = node.input
    rows, columns = weights.shape(weight)
    if group := _eight_bit_group(columns):
        names = weights.in_eight_bits(weight, group)
        _multiply_by_eight_bits(node, [x, *names], rows, columns, group)


def _attention(node: onnx.NodeProto, weights: _Weights) -> None:
    q, kv_a, kv_norm, w_uk, w_uv, *rest = node.input
    names = [*weights.by_column(w_uk), *weights.by_column(w_uv)]
    node.op_type = "LatentAttentionInt8"
    replace(node.input, [q, kv_a, kv_norm, *names, *rest])


def _eight_bit_group(columns: int) -> int:
    """Return how many inputs share a scale; 0: rows do not divide into groups."""
    return next((group for group in _EIGHT_BIT_GROUPS if columns % group == 0), 0)


def _multiply_by_eight_bits(
    node: onnx.NodeProto, inputs: list[str], rows: int, columns: int, group: int
) -> None:
    """Make `node` the product of x with codes [rows, G, group] and scales [rows, G]."""
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
            block_size=group,
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

    def in_eight_bits(self, name: str, group: int) -> list[str]:
        """Add codes UINT8 [N, G, group] and scales [N, G] of the float weight `name` [N, K].

        Zero is 128. Returns their names.
        """
        rows, columns = self.shape(name)
        shape = (rows, columns // group, group)
        return self._rounded(name, shape, axis=-1, scales_shape=shape[:-1])

    def by_column(self, name: str) -> list[str]:
        """Add codes UINT8 [H, K, N] and scales [H, 1, N] of the float weight `name` [H, K, N]."""
        heads, rows, columns = shape = self.shape(name)
        return self._rounded(name, shape, axis=1, scales_shape=(heads, 1, columns))

    def _rounded(
        self, name: str, shape: tuple[int, ...], *, axis: int, scales_shape: tuple[int, ...]
    ) -> list[str]:
        """Add codes [*shape] with a scale for all values along `axis`."""
        names = [f"{name}.codes", f"{name}.scales"]
        if names[0] in self._done:
            for added in names:
                self.add(self._done[added])
            return names
        stored = self.tensor(name)
        dtype = helper.tensor_dtype_to_np_dtype(stored.data_type)
        values = self.data(stored).view(dtype).reshape(shape)

        def chunks() -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
            for chunk in _row_chunks(values):
                wide = chunk.astype(np.float32)
                scales = np.abs(wide).max(axis=axis, keepdims=True) / np.float32(_EIGHT_BIT_LEVELS)
                yield wide, np.maximum(scales, np.finfo(np.float32).tiny)

        codes = (np.rint(wide / scale + 128).astype(np.uint8) for wide, scale in chunks())
        scales = (scale for _, scale in chunks())
        for added, new_shape, kind, blocks in zip(
            names, (shape, scales_shape), (_UINT8, _FLOAT), (codes, scales), strict=True
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
