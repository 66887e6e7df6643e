"""One model file on a device of ONNX Runtime, with pools, inputs and outputs there.

The model is what build/onnxruntime.py writes for CUDA: as ort_model.py describes it, but

    slot_mapping    int64 [T + Z, 2]    the last Z slots are cleared
    best_logits     float [R, n]        the largest logits of each row, descending,
    best_ids        int64 [R, n]        their tokens, and
    best_totals     float [R, 1]        the sum of all exponentials relative to the first one's

A call in which each row has one token runs in buffers that stay: its batch and its block tables are
rounded up to one of a few sizes, and the CUDA provider records such a call as a graph when it first
runs. Everything else is bound anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from deepseek_triton.kv_cache.spec import KVCacheSpec
from deepseek_triton.runner.ort_model import (
    SQUARED_NORMS,
    ModelRow,
    begun_blocks,
    calls_of,
    overflowed_rows,
    step_inputs,
)
from deepseek_triton.runner.ort_plan import GPU_COSTS, Piece

_NO_GRAPH = -1  # as the provider spells it
_BEST = ("best_logits", "best_ids", "best_totals")
_Array = NDArray[Any]


@dataclass(frozen=True)
class _Recorded:
    """A shape of decode call with buffers of its own."""

    binding: Any
    inputs: Mapping[str, ort.OrtValue]
    outputs: Mapping[str, ort.OrtValue]
    options: ort.RunOptions


class DeviceModel:
    """A session and the pools that it writes. Not thread-safe."""

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: KVCacheSpec,
        pools: Mapping[str, ort.OrtValue],
        *,
        device: str,
        num_heads: int,
        vocab_size: int,
    ) -> None:
        """`pools` [num_blocks + 1, block_size, width] by input name; the last block is scratch."""
        self._session: ort.InferenceSession | None = session
        self._spec, self._device = spec, device
        self._num_heads, self._vocab_size = num_heads, vocab_size
        self._pools = dict(pools)
        self._scratch = next(iter(pools.values())).shape()[0] - 1
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._options = _run_options(_NO_GRAPH)
        outputs = session.get_outputs()
        names = ("logits", *_BEST, SQUARED_NORMS)
        self._columns = {o.name: o.shape[1] for o in outputs if o.name in names}

    def logits(
        self, rows: Sequence[ModelRow]
    ) -> tuple[NDArray[np.float32], list[list[int]], tuple[int, ...]]:
        """Run the model; return logits [R, V], each row's places among them, and `overflowed`.

        These are the rows that `overflowed_rows` names. Mutates the pools.
        """
        (logits,), places, overflowed = self._forward(rows, ("logits",))
        return logits, places, overflowed

    def best(
        self, rows: Sequence[ModelRow]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], list[list[int]], tuple[int, ...]]:
        """As `logits`, with the likeliest tokens [R] and their log probs [R] in place of logits.

        A log prob is NaN for a row whose logits are not finite, or none is. Mutates the pools.
        """
        (values, ids, totals), places, overflowed = self._forward(rows, _BEST)
        equal = np.where(values == values[:, :1], ids, self._vocab_size)
        return equal.min(axis=1).astype(np.int32), -np.log(totals[:, 0]), places, overflowed

    def close(self) -> None:
        """Free the session, the buffers and the pools; idempotent."""
        self._recorded.clear()
        self._session = None
        self._pools.clear()

    def _forward(
        self, rows: Sequence[ModelRow], names: Sequence[str]
    ) -> tuple[list[_Array], list[list[int]], tuple[int, ...]]:
        calls, places = calls_of(rows, num_heads=self._num_heads, costs=GPU_COSTS)
        parts: list[list[_Array]] = [[] for _ in names]
        overflowed: set[int] = set()
        for pieces, logit_rows in calls:
            run = self._decode if pieces[0].length == 1 else self._prefill
            *arrays, norms = run(rows, pieces, logit_rows, names)
            for part, array in zip(parts, arrays, strict=True):
                part.append(array)
            overflowed.update(overflowed_rows(rows, pieces, norms))
        return [np.concatenate(part) for part in parts], places, tuple(sorted(overflowed))

    def _blank_slots(self, rows: Sequence[ModelRow], pieces: Sequence[Piece]) -> NDArray[np.int64]:
        """Return the slots [Z, 2] that follow the tokens of pieces which begin a block.

        What the block's last owner left there, NaN included, must not reach a product.
        """
        size = self._spec.block_size
        begun = begun_blocks(self._spec, rows, pieces)
        slots = [(block, offset) for block, used in begun for offset in range(used, size)]
        return np.array(slots, np.int64).reshape(-1, 2)

    def _prefill(
        self,
        rows: Sequence[ModelRow],
        pieces: Sequence[Piece],
        logit_rows: list[int],
        names: Sequence[str],
    ) -> list[_Array]:
        """Run a call of any shape; return what `names` say [R, …] and the squared norms [B, S]."""
        inputs = self._inputs(rows, pieces, len(pieces), max(p.num_keys for p in pieces))
        blank = self._blank_slots(rows, pieces)
        inputs["slot_mapping"] = np.concatenate([inputs["slot_mapping"], blank])
        # Kernels of reductions were not made for no rows at all.
        inputs["logit_rows"] = np.array(logit_rows or [0], np.int64)
        binding = self._bound_to_pools()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        outputs = {name: self._empty(name, max(1, len(logit_rows))) for name in names}
        norms = outputs[SQUARED_NORMS] = self._empty(SQUARED_NORMS, inputs["input_ids"].size)
        for name, array in outputs.items():
            place = array.ctypes.data
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, place)
        self._open_session().run_with_iobinding(binding, self._options)
        chosen = [outputs[name][: len(logit_rows)] for name in names]
        return [*chosen, norms.reshape(inputs["input_ids"].shape)]

    def _decode(
        self,
        rows: Sequence[ModelRow],
        pieces: Sequence[Piece],
        logit_rows: list[int],
        names: Sequence[str],
    ) -> list[_Array]:
        """As `_prefill`, of one token a row in the buffers of its rounded shape."""
        size = self._spec.block_size
        batch = rounded(len(pieces))
        blocks = rounded(self._spec.blocks_for(max(p.num_keys for p in pieces)))
        inputs = self._inputs(rows, pieces, batch, blocks * size)
        blank = self._blank_slots(rows, pieces)
        unused = np.full((batch * size - len(blank), 2), (self._scratch, 0), np.int64)
        inputs["slot_mapping"] = np.concatenate([inputs["slot_mapping"], blank, unused])
        call = self._recorded.get((batch, blocks)) or self._record(batch, blocks, inputs)
        for name, value in call.inputs.items():
            if name in inputs:
                value.update_inplace(inputs[name])
        self._open_session().run_with_iobinding(call.binding, call.options)
        chosen = [call.outputs[name].numpy()[logit_rows] for name in names]
        return [*chosen, call.outputs[SQUARED_NORMS].numpy()]

    def _record(self, batch: int, blocks: int, inputs: Mapping[str, _Array]) -> _Recorded:
        """Allocate the buffers of a shape; the first run with them becomes a graph."""
        rows = {"logit_rows": np.arange(batch, dtype=np.int64)}
        on_device = {
            name: ort.OrtValue.ortvalue_from_numpy(array.copy(), self._device, 0)
            for name, array in {**inputs, **rows}.items()
        }
        binding = self._bound_to_pools()
        outputs = {}
        for name in self._columns:
            array = self._empty(name, batch)
            outputs[name] = ort.OrtValue.ortvalue_from_numpy(array, self._device, 0)
            binding.bind_ortvalue_output(name, outputs[name])
        for name, value in on_device.items():
            binding.bind_ortvalue_input(name, value)
        options = _run_options(len(self._recorded))
        call = _Recorded(binding, on_device, outputs, options)
        self._recorded[batch, blocks] = call
        return call

    def _inputs(
        self, rows: Sequence[ModelRow], pieces: Sequence[Piece], batch: int, num_keys: int
    ) -> dict[str, _Array]:
        return step_inputs(
            rows, pieces, self._spec, batch=batch, num_keys=num_keys, scratch=self._scratch
        )

    def _bound_to_pools(self) -> Any:
        binding = self._open_session().io_binding()
        for name, value in self._pools.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("_pool.", "_pool_out."), value)
        return binding

    def _empty(self, name: str, count: int) -> _Array:
        columns = self._columns[name]
        return np.zeros((count, columns), np.int64 if name == "best_ids" else np.float32)

    def _open_session(self) -> ort.InferenceSession:
        if self._session is None:
            raise RuntimeError("the runner is closed")
        return self._session


def rounded(count: int) -> int:
    """Return the first of 1, 2, 3, 4, 6, 8, 12, 16, 24 … that is at least `count`."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def _run_options(graph: int) -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    return options
