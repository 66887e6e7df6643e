"""Runs a step-wise model over a ragged workload and compares it with the reference.

`check_parity` takes any function from the rows of a step to their logits, so that every engine can
be put to the same test; `PortableModel` is that function for the portable graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from deepseek_triton.request import RequestKey
from deepseek_triton.runner.base import StepRow
from tests.parity.cases import Reference

TOLERANCE = 1e-4  # max abs, float32

Forward = Callable[[tuple[StepRow, ...]], NDArray[np.float32]]
"""Rows of one step → logits [len(rows), V] at the last token of each."""


@dataclass(frozen=True)
class Workload:
    """Sequences that arrive together, each prefilled in chunks of its own size, then decoded."""

    sequences: tuple[NDArray[np.int32], ...]
    prompt_lens: tuple[int, ...]
    chunk_sizes: tuple[int, ...]
    block_tables: tuple[NDArray[np.int32], ...]
    block_size: int
    num_blocks: int

    def steps(self) -> Iterator[list[tuple[int, StepRow]]]:
        """Yield steps of (sequence index, row) until every sequence is consumed."""
        done = [0] * len(self.sequences)
        while any(done[i] < len(ids) for i, ids in enumerate(self.sequences)):
            step = []
            for i, ids in enumerate(self.sequences):
                if done[i] == len(ids):
                    continue
                prefill = self.prompt_lens[i] - done[i]
                count = min(self.chunk_sizes[i], prefill) if prefill > 0 else 1
                blocks = -(-(done[i] + count) // self.block_size)
                row = StepRow(
                    request_key=RequestKey(f"sequence-{i}"),
                    token_ids=ids[done[i] : done[i] + count],
                    context_len=done[i],
                    block_table=self.block_tables[i][:blocks],
                    sampling=None,
                )
                step.append((i, row))
                done[i] += count
            yield step


def make_workload(vocab_size: int, block_size: int = 4, seed: int = 0) -> Workload:
    """Return five ragged sequences with shuffled blocks: 1 to 53 prompt tokens, 10 decode steps."""
    rng = np.random.default_rng(seed)
    prompt_lens = (1, 7, 16, 30, 53)
    chunk_sizes = (1, 3, 16, 11, 20)
    sequences = tuple(rng.integers(0, vocab_size, n + 10).astype(np.int32) for n in prompt_lens)
    counts = [-(-len(ids) // block_size) for ids in sequences]
    shuffled = rng.permutation(sum(counts)).astype(np.int32)
    tables = tuple(np.split(shuffled, np.cumsum(counts)[:-1]))
    return Workload(sequences, prompt_lens, chunk_sizes, tables, block_size, sum(counts))


def check_parity(
    reference: Reference,
    workload: Workload,
    forward: Forward,
    layer_outputs: Callable[[], Sequence[NDArray[np.float32]]] | None = None,
) -> None:
    """Run `workload` through `forward`; raise AssertionError at the first difference.

    `layer_outputs` gives the hidden states [B, S, D] after each layer in the latest step: with it
    the message names the first layer that is off.
    """
    expected = [reference.run(ids) for ids in workload.sequences]
    for number, step in enumerate(workload.steps()):
        logits = forward(tuple(row for _, row in step))
        hidden = layer_outputs() if layer_outputs is not None else []
        for b, (i, row) in enumerate(step):
            where = f"step {number}, {row.request_key}, positions from {row.context_len}"
            want_logits, want_hidden = expected[i]
            count = len(row.token_ids)
            span = slice(row.context_len, row.context_len + count)
            for layer, values in enumerate(hidden):
                _compare(values[b, :count], want_hidden[layer][span], f"layers.{layer}", where)
            _compare(logits[b], want_logits[span][-1], "logits", where)


def _compare(got: NDArray[Any], want: NDArray[Any], part: str, where: str) -> None:
    error = np.abs(got - want).max()
    assert error <= TOLERANCE, f"{part} is the first to differ: by {error:.2e} in {where}"


class PortableModel:
    """The portable graph on ONNX Runtime, with pools kept in NumPy arrays."""

    def __init__(self, path: Path, workload: Workload, *, expose_layers: bool = True) -> None:
        model = onnx.load(path, load_external_data=False)
        pools = [value.name for value in model.graph.input if "_pool." in value.name]
        self._num_layers = len({name.rpartition(".")[2] for name in pools})
        self._hidden = [f"layers.{i}.output" for i in range(self._num_layers)]
        if expose_layers:
            for name in self._hidden:
                model.graph.output.add(
                    name=name
                ).type.tensor_type.elem_type = onnx.TensorProto.FLOAT
            path = path.with_name("exposed.onnx")
            onnx.save(model, path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # the models are too small to share
        self._session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        self._output_names = [output.name for output in self._session.get_outputs()]
        self._outputs: dict[str, NDArray[Any]] = {}
        width = self._session.get_inputs()[-1].shape[-1]
        shape = (workload.num_blocks, workload.block_size, width)
        # Stale rows of other requests must not matter: begin with large values, not with zeros.
        rng = np.random.default_rng(7)
        self._pools = {name: rng.normal(0, 100, shape).astype(np.float32) for name in pools}

    def forward(self, rows: tuple[StepRow, ...]) -> NDArray[np.float32]:
        """Run one padded step, write the new KV rows into the pools, return logits [B, V]."""
        values = self._session.run(None, {**_padded(rows), **self._pools})
        self._outputs = dict(zip(self._output_names, values, strict=True))
        for name, pool in self._pools.items():
            new_rows = self._outputs["new_" + name.replace("_pool.", ".")]
            for b, row in enumerate(rows):
                slots = np.arange(row.context_len, row.context_len + len(row.token_ids))
                blocks = row.block_table[slots // pool.shape[1]]
                pool[blocks, slots % pool.shape[1]] = new_rows[b, : len(slots)]
        assert all(np.isfinite(value).all() for value in values), "padding made a NaN"
        return self._outputs["logits"]

    def layer_outputs(self) -> list[NDArray[np.float32]]:
        """Return the hidden states [B, S, D] after each layer in the latest step."""
        batch = len(self._outputs["logits"])
        hidden = [self._outputs[name] for name in self._hidden]
        return [values.reshape(batch, -1, values.shape[-1]) for values in hidden]


def _padded(rows: tuple[StepRow, ...]) -> dict[str, NDArray[Any]]:
    """Return the graph's inputs but the pools; one token and one block more than needed."""
    batch = len(rows)
    tokens = max(len(row.token_ids) for row in rows)
    tokens += tokens > 1  # decode steps stay [B, 1]
    blocks = max(len(row.block_table) for row in rows) + 1
    feeds = {
        "input_ids": np.zeros((batch, tokens), np.int32),
        "positions": np.full((batch, tokens), -1, np.int32),
        "context_lens": np.array([row.context_len for row in rows], np.int32),
        "block_tables": np.zeros((batch, blocks), np.int32),
        "last_token": np.array([len(row.token_ids) - 1 for row in rows], np.int32),
    }
    for b, row in enumerate(rows):
        count = len(row.token_ids)
        feeds["input_ids"][b, :count] = row.token_ids
        feeds["positions"][b, :count] = np.arange(row.context_len, row.context_len + count)
        feeds["block_tables"][b, : len(row.block_table)] = row.block_table
    return feeds
