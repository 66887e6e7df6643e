"""Weights of one rank in TensorRT-LLM 1.2's checkpoint form.

Names, shapes and splits are those that its public source loads: models/deepseek_v2/convert.py,
models/llama/convert.py, models/modeling_utils.py (INT4), layers/moe.py, mapping.py of release 1.2.
Every tensor is made when it is written, from views on the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from deepseek_triton.build.parallel import Parallel
from deepseek_triton.checkpoint.names import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.checkpoint.spec import (
    GroupedQueryAttentionSpec,
    LatentAttentionSpec,
    ModelSpec,
    MoESpec,
)
from deepseek_triton.checkpoint.writer import LazyTensor
from deepseek_triton.errors import ConfigError
from deepseek_triton.quantize.int4 import Int4Weight

Array = NDArray[Any]


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of lm_head when tp ranks share them evenly."""
    return -(-vocab_size // tp) * tp


@dataclass(frozen=True)
class _Share:
    """The part of a linear layer's weight [N, K] that a rank holds."""

    source: str
    shape: tuple[int, int]
    rows: slice
    columns: slice

    def cut(self, weight: Int4Weight) -> Int4Weight:
        """Return the part of an INT4 weight; its columns must be whole groups."""
        if weight.zero_points is not None or weight.input_order is not None:
            raise ConfigError(
                f"{self.source}: TensorRT-LLM's INT4 form has neither zero points nor an input "
                "order; quantize the dense checkpoint with SYMMETRIC=1"
            )
        size, inputs = weight.group_size, self.shape[1]
        begin, end, _ = self.columns.indices(inputs)
        if begin % size or (end % size and end != inputs):
            raise ConfigError(
                f"TP: {self.source}: a rank's {end - begin} inputs are not whole INT4 groups of "
                f"{size}"
            )
        groups = slice(begin // size, -(-end // size))
        codes, scales = weight.codes[self.rows, self.columns], weight.scales[self.rows, groups]
        return Int4Weight(np.ascontiguousarray(codes), np.ascontiguousarray(scales), None, size)


class RankWeights:
    """Makes the tensors of one rank."""

    def __init__(
        self,
        spec: ModelSpec,
        reader: CheckpointReader,
        parallel: Parallel,
        rank: int,
        dtype: DTypeLike,
    ) -> None:
        self._spec, self._reader, self._parallel = spec, reader, parallel
        self._stage, self._tp_rank = divmod(rank, parallel.tp)
        self._dtype = np.dtype(dtype)

    def tensors(self) -> list[LazyTensor]:
        """Return every tensor of the rank, in the order of computation."""
        return [tensor for tensor in self._all() if tensor is not None]

    def _all(self) -> Iterator[LazyTensor]:
        spec, last = self._spec, self._parallel.pp - 1
        table = (spec.vocab_size, spec.hidden_size)
        if self._stage == 0:
            yield self._tensor(
                "transformer.vocab_embedding.weight", table, self._read(EMBEDDING, table)
            )
        layers = self._parallel.layers(self._stage, spec.num_layers)
        for layer in layers:
            yield from self._layer(layer, f"transformer.layers.{layer - layers[0]}.")
        if self._stage == last:
            size = (spec.hidden_size,)
            yield self._tensor("transformer.ln_f.weight", size, self._read(FINAL_NORM, size))
            yield self._lm_head(table)

    def _lm_head(self, table: tuple[int, int]) -> LazyTensor:
        rows = padded_vocab_size(table[0], self._parallel.tp) // self._parallel.tp
        source = EMBEDDING if self._spec.tie_word_embeddings else LM_HEAD

        def blocks() -> Iterator[Array]:
            begin = self._tp_rank * rows
            own = self._reader.require(source, table)[begin : begin + rows]
            yield own
            yield np.zeros((rows - len(own), table[1]), own.dtype)

        return self._tensor("lm_head.weight", (rows, table[1]), blocks())

    def _layer(self, layer: int, name: str) -> Iterator[LazyTensor]:
        spec, source = self._spec, layer_prefix(layer)
        size = (spec.hidden_size,)
        for ours, theirs in (
            ("input_layernorm", "input_layernorm"),
            ("post_layernorm", "post_attention_layernorm"),
        ):
            yield self._tensor(
                f"{name}{ours}.weight", size, self._read(f"{source}{theirs}.weight", size)
            )
        if isinstance(spec.attention, LatentAttentionSpec):
            yield from self._latent_attention(
                spec.attention, f"{name}attention.", source + "self_attn."
            )
        else:
            yield from self._grouped_query_attention(
                spec.attention, f"{name}attention.", source + "self_attn."
            )
        if spec.moe is not None and layer in spec.moe_layers:
            yield from self._experts(spec.moe, f"{name}mlp.", source + "mlp.")
        else:
            yield from self._mlp(f"{name}mlp.", source + "mlp.", spec.intermediate_size)

    def _latent_attention(
        self, attention: LatentAttentionSpec, name: str, source: str
    ) -> Iterator[LazyTensor]:
        """The projections, and `fused_q_proj`: queries taken into the latent space by k_nope."""
        hidden, rank = self._spec.hidden_size, attention.kv_lora_rank
        nope, rope, value = (
            attention.qk_nope_head_dim,
            attention.qk_rope_head_dim,
            attention.v_head_dim,
        )
        q_rank = attention.q_lora_rank
        first = [(source + "kv_a_proj_with_mqa", attention.latent_width)]
        q_source, q_inputs = source + "q_proj.weight", hidden
        if q_rank is not None:
            first.insert(0, (source + "q_a_proj", q_rank))
            q_source, q_inputs = source + "q_b_proj.weight", q_rank
            norm = self._read(source + "q_a_layernorm.weight", (q_rank,))
            yield self._tensor(f"{name}q_a_layernorm.weight", (q_rank,), norm)
        rows = sum(count for _, count in first)
        parts = [part for s, n in first for part in self._read(s + ".weight", (n, hidden))]
        yield self._tensor(f"{name}fused_a.weight", (rows, hidden), parts)
        norm = self._read(source + "kv_a_layernorm.weight", (rank,))
        yield self._tensor(f"{name}kv_a_layernorm.weight", (rank,), norm)

        heads = attention.num_heads // self._parallel.tp
        own = slice(self._tp_rank * heads, (self._tp_rank + 1) * heads)

        def q_heads() -> Array:
            whole = self._reader.require(q_source, (attention.num_heads * (nope + rope), q_inputs))
            return whole.reshape(attention.num_heads, nope + rope, q_inputs)[own]

        def kv_heads() -> Array:
            rows = attention.num_heads * (nope + value)
            whole = self._reader.require(source + "kv_b_proj.weight", (rows, rank))
            return whole.reshape(attention.num_heads, nope + value, rank)[own]

        def fused_q() -> Iterator[Array]:
            for q, kv in zip(q_heads(), kv_heads(), strict=True):
                yield kv[:nope].astype(np.float32).T @ q[:nope].astype(np.float32)
                yield q[nope:]

        def kv_b() -> Iterator[Array]:
            yield from (head[:nope] for head in kv_heads())
            yield from (head[nope:] for head in kv_heads())

        yield self._tensor(f"{name}fused_q_proj", (heads * (rank + rope), q_inputs), fused_q())
        yield self._tensor(f"{name}q_b_proj", (heads * (nope + rope), q_inputs), _later(q_heads))
        yield self._tensor(f"{name}kv_b_proj", (heads * (nope + value), rank), kv_b())
        yield from self._by_columns(
            f"{name}dense", source + "o_proj", hidden, attention.num_heads * value
        )

    def _grouped_query_attention(
        self, attention: GroupedQueryAttentionSpec, name: str, source: str
    ) -> Iterator[LazyTensor]:
        """q, k and v one after another; ranks beyond the KV heads hold copies of them."""
        hidden, dim, tp = self._spec.hidden_size, attention.head_dim, self._parallel.tp
        parts = []
        for letter, heads in (
            ("q", attention.num_heads),
            ("k", attention.num_kv_heads),
            ("v", attention.num_kv_heads),
        ):
            count = max(1, heads // tp)
            begin = self._tp_rank * heads // tp
            parts.append((f"{source}{letter}_proj", heads * dim, begin * dim, count * dim))
        yield from self._by_rows(f"{name}qkv", parts, hidden, bias=attention.qkv_bias)
        yield from self._by_columns(
            f"{name}dense", source + "o_proj", hidden, attention.num_heads * dim
        )

    def _mlp(self, name: str, source: str, size: int) -> Iterator[LazyTensor]:
        """Here `fc` is the gate and `gate` the up projection."""
        hidden, own = self._spec.hidden_size, size // self._parallel.tp
        for ours, theirs in (("fc", "gate_proj"), ("gate", "up_proj")):
            part = (source + theirs, size, self._tp_rank * own, own)
            yield from self._by_rows(name + ours, [part], hidden)
        yield from self._by_columns(f"{name}proj", source + "down_proj", hidden, size)

    def _experts(self, moe: MoESpec, name: str, source: str) -> Iterator[LazyTensor]:
        """Router in float32; of each expert the up rows, then the gate rows."""
        hidden, routing, parallel = self._spec.hidden_size, moe.routing, self._parallel
        router = (routing.num_experts, hidden)
        gate = self._read(source + "gate.weight", router)
        yield self._tensor(f"{name}router.weight", router, gate, np.float32)
        if routing.kind == "sigmoid":
            bias = self._read(source + "gate.e_score_correction_bias", router[:1])
            yield self._tensor(f"{name}e_score_correction_bias", router[:1], bias, np.float32)
        count = routing.num_experts // parallel.ep
        first = self._tp_rank % parallel.ep * count
        own = moe.expert_intermediate_size // (parallel.tp // parallel.ep)
        begin = self._tp_rank // parallel.ep * own
        units = slice(begin, begin + own)
        rows, columns = (
            (moe.expert_intermediate_size, hidden),
            (hidden, moe.expert_intermediate_size),
        )
        experts = [f"{source}experts.{first + index}." for index in range(count)]

        def fc() -> Iterator[Array]:
            for expert in experts:
                yield self._reader.require(expert + "up_proj.weight", rows)[units]
                yield self._reader.require(expert + "gate_proj.weight", rows)[units]

        def proj() -> Iterator[Array]:
            for expert in experts:
                yield self._reader.require(expert + "down_proj.weight", columns)[:, units]

        yield self._tensor(f"{name}fc.weight", (count, 2 * own, hidden), fc())
        yield self._tensor(f"{name}proj.weight", (count, hidden, own), proj())
        size = moe.shared_intermediate_size
        if size:
            shared, ours = source + "shared_experts.", size // parallel.tp
            both = [
                (shared + part, size, self._tp_rank * ours, ours)
                for part in ("up_proj", "gate_proj")
            ]
            yield from self._by_rows(f"{name}shared_expert.fc", both, hidden)
            yield from self._by_columns(
                f"{name}shared_expert.proj", shared + "down_proj", hidden, size
            )

    def _by_rows(
        self,
        name: str,
        parts: list[tuple[str, int, int, int]],
        inputs: int,
        *,
        bias: bool = False,
    ) -> Iterator[LazyTensor]:
        """Rows [begin, begin + count) of each (source, rows, begin, count), one after another."""
        total = sum(count for _, _, _, count in parts)
        shares = [
            _Share(source, (rows, inputs), slice(begin, begin + count), slice(inputs))
            for source, rows, begin, count in parts
        ]
        yield from self._linear(name, (total, inputs), shares)
        if bias:
            blocks = [
                self._reader.require(source + ".bias", (rows,))[begin : begin + count]
                for source, rows, begin, count in parts
            ]
            yield self._tensor(f"{name}.bias", (total,), blocks)

    def _by_columns(
        self, name: str, source: str, outputs: int, inputs: int
    ) -> Iterator[LazyTensor]:
        """The rank's share of the inputs of a linear layer whose results are summed."""
        own = inputs // self._parallel.tp
        columns = slice(self._tp_rank * own, (self._tp_rank + 1) * own)
        share = _Share(source, (outputs, inputs), slice(outputs), columns)
        yield from self._linear(name, (outputs, own), [share])

    def _linear(
        self, name: str, shape: tuple[int, int], shares: list[_Share]
    ) -> Iterator[LazyTensor]:
        sizes = {self._reader.int4_group_size(share.source) for share in shares}
        (size, *others) = sizes
        if others:
            raise ConfigError(
                f"{name}: its parts {', '.join(s.source for s in shares)} are quantized differently"
            )
        if size is None:
            dense = (
                self._reader.require(s.source + ".weight", s.shape)[s.rows, s.columns]
                for s in shares
            )
            yield self._tensor(f"{name}.weight", shape, dense)
            return
        half, groups = (shape[0] // 2, shape[1]), -(-shape[1] // size)
        packed = (pack_int4(self._int4(share)) for share in shares)
        scales = (self._int4(share).scales for share in shares)
        yield LazyTensor(f"{name}.weight", np.dtype(np.int8), half, packed)
        yield self._tensor(f"{name}.weights_scaling_factor", (shape[0], groups), scales)

    def _int4(self, share: _Share) -> Int4Weight:
        weight = self._reader.linear(share.source, share.shape)
        if not isinstance(weight, Int4Weight):
            raise TypeError(f"{share.source} is not INT4")
        return share.cut(weight)

    def _read(self, name: str, shape: tuple[int, ...]) -> Iterable[Array]:
        return _later(lambda: self._reader.require(name, shape))

    def _tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        blocks: Iterable[Array],
        dtype: DTypeLike | None = None,
    ) -> LazyTensor:
        return LazyTensor(name, self._dtype if dtype is None else np.dtype(dtype), shape, blocks)


def _later(make: Callable[[], Array]) -> Iterator[Array]:
    """Make the one block of a tensor when it is written."""
    yield make()


def pack_int4(weight: Int4Weight) -> NDArray[np.int8]:
    """Two rows a byte, int8 [N/2, K]: the even row in the low bits, each as code − 8 (4-bit two's
    complement), which its loader rearranges for its kernels.
    """
    signed = (weight.codes ^ 8).astype(np.uint8)
    return (signed[0::2] | signed[1::2] << 4).view(np.int8)
