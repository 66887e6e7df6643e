"""ModelRunner on ONNX Runtime's CPU kernels, with the KV pools written in place.

    rows ──plan_calls──▶ calls (padded [B, S]) ──IOBinding──▶ session ──▶ logits ──▶ sampler
                                                 ▲    │
                                                 └────┘ pools: one buffer, bound as input and output

The engine directory's model (build/onnxruntime.py) has these inputs; T = B · S:

    input_ids     int32 [B, S]
    positions     int32 [B, S]        −1 = padding
    block_tables  int32 [B, M]
    slot_mapping  int64 [T, 2]        (block, offset) that receives each token's KV row
    logit_rows    int64 [R]           indices into T of the tokens whose logits are wanted
    kv_pool.<l>   float [N, bs, W]    and kv_pool_out.<l>, the same buffer

and the output `logits` float [R, V].

Nothing of one row reaches another through the cache: padding tokens write to a scratch block that
is never read, block tables are padded with blocks of the same row, and a block is zeroed beyond
the written part when a row begins it, so that what its last owner left, NaN included, is gone.
Nor do shapes reach a row: its logits are the same to the last bit alone or in company, in one chunk
or in many (build/ort_functions.py and ort_shapes.py say how).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from deepseek_triton.build.engine_dir import EngineDir, load_engine_dir, mismatch
from deepseek_triton.errors import ConfigError, EngineMismatchError
from deepseek_triton.kv_cache.spec import KVCacheSpec
from deepseek_triton.runner.base import StepResult, StepRow
from deepseek_triton.runner.ort_plan import Piece, plan_calls
from deepseek_triton.runner.ort_session import allocate_pools, available_cores, open_session
from deepseek_triton.runner.ort_shapes import least_keys, padded_batch
from deepseek_triton.runner.sampler import sample

logger = logging.getLogger(__name__)

TARGET = "onnxruntime"


class OnnxRuntimeRunner:
    """Runs an engine directory built for the target "onnxruntime"; implements ModelRunner."""

    def __init__(self, engine: EngineDir, *, num_blocks: int, num_threads: int = 0) -> None:
        """Load the model and allocate the pools.

        `num_threads` 0 means the cores that this process may use.

        Raises:
            EngineMismatchError: the engine is for another target or ONNX Runtime version.
            ConfigError: `num_blocks` or `num_threads` is out of range or memory is short.
        """
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, not {num_blocks}")
        if num_threads < 0:
            raise ConfigError(f"num_threads must be at least 0, not {num_threads}")
        manifest = engine.manifest
        _check_runtime(engine)
        self._num_threads = num_threads or available_cores()
        self._session: ort.InferenceSession | None = open_session(
            engine.model_path, self._num_threads
        )
        self._vocab_size = manifest.model.vocab_size
        self._num_heads = manifest.model.attention.num_heads
        self._spec = manifest.kv_cache
        self._num_blocks = num_blocks
        self._pools = allocate_pools(self._spec, num_blocks + 1)  # the last one is for padding
        self._binding = self._session.io_binding()
        self._values = [ort.OrtValue.ortvalue_from_numpy(pool) for pool in self._pools]
        for layer, value in enumerate(self._values):
            self._binding.bind_ortvalue_input(f"kv_pool.{layer}", value)
            self._binding.bind_ortvalue_output(f"kv_pool_out.{layer}", value)
        self._logits: NDArray[np.float32] = np.empty((0, self._vocab_size), np.float32)
        logger.info(
            "loaded %s: %d KV blocks, %.1f MiB",
            engine.path,
            num_blocks,
            self._spec.bytes_per_block * num_blocks / 2**20,
        )

    @classmethod
    def load(cls, path: Path, *, num_blocks: int, num_threads: int = 0) -> OnnxRuntimeRunner:
        """Verify the engine directory `path` and load it."""
        engine = load_engine_dir(path, target=TARGET)
        return cls(engine, num_blocks=num_blocks, num_threads=num_threads)

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self._vocab_size

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """Geometry of the pools."""
        return self._spec

    @property
    def num_blocks(self) -> int:
        """Blocks that the scheduler may hand out: ids 0 … num_blocks − 1."""
        return self._num_blocks

    def run(self, rows: tuple[StepRow, ...]) -> StepResult:
        """See ModelRunner.run."""
        order, logits = self.forward(rows)
        token_ids = np.full(len(rows), -1, np.int32)
        log_probs = np.full(len(rows), np.nan, np.float32)
        samplings = [s for index in order if (s := rows[index].sampling) is not None]
        if samplings:
            token_ids[order], log_probs[order] = sample(logits, samplings)
        return StepResult(token_ids, log_probs)

    def forward(self, rows: Sequence[StepRow]) -> tuple[list[int], NDArray[np.float32]]:
        """Run the model; return the indices of the sampling rows and their logits [n, V].

        The logits are a view that the next call overwrites. Mutates the pools.
        """
        order: list[int] = []
        wanted = sum(row.sampling is not None for row in rows)
        if wanted > len(self._logits):
            self._logits = np.empty((wanted, self._vocab_size), np.float32)
        self._clear_new_tails(rows)
        for pieces in plan_calls(rows, num_heads=self._num_heads):
            sampling = [
                i for i, p in enumerate(pieces) if p.is_last and rows[p.row].sampling is not None
            ]
            begin = len(order)
            order += [pieces[i].row for i in sampling]
            self._call(rows, pieces, sampling, self._logits[begin : len(order)])
        return order, self._logits[: len(order)]

    def close(self) -> None:
        """Free the model and the pools; idempotent."""
        self._session = None
        self._binding = None
        self._values, self._pools = [], []

    def _call(
        self,
        rows: Sequence[StepRow],
        pieces: tuple[Piece, ...],
        sampling: list[int],
        logits: NDArray[np.float32],
    ) -> None:
        """Run one call; write the logits of the pieces `sampling` into `logits` [R, V]."""
        if self._session is None:
            raise RuntimeError("the runner is closed")
        for name, array in self._inputs(rows, pieces, sampling).items():
            self._binding.bind_cpu_input(name, array)
        self._binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(self._binding)

    def _inputs(
        self, rows: Sequence[StepRow], pieces: tuple[Piece, ...], sampling: list[int]
    ) -> dict[str, NDArray[np.int32] | NDArray[np.int64]]:
        block_size, count = self._spec.block_size, len(pieces)
        length = pieces[0].length  # the planner puts the longest first
        batch = padded_batch(
            count,
            length,
            num_heads=self._num_heads,
            width=self._spec.width,
            num_threads=self._num_threads,
        )
        num_keys = max(least_keys(batch, self._num_threads), *(p.num_keys for p in pieces))
        input_ids = np.zeros((batch, length), np.int32)
        tables = np.empty((batch, self._spec.blocks_for(num_keys)), np.int32)
        for i, piece in enumerate(pieces):
            row = rows[piece.row]
            input_ids[i, : piece.length] = row.token_ids[piece.start : piece.start + piece.length]
            used = self._spec.blocks_for(piece.num_keys)
            tables[i, :used] = row.block_table[:used]
            tables[i, used:] = row.block_table[0]
        input_ids[count:], tables[count:] = input_ids[0], tables[0]
        copied = [*pieces, *pieces[:1] * (batch - count)]
        lengths = np.array([p.length for p in copied])[:, None]
        context_lens = np.array([p.context_len for p in copied])[:, None]
        offsets = np.arange(length)
        positions = np.where(offsets < lengths, context_lens + offsets, -1)
        # Padding and copies write into the scratch block.
        written = (positions >= 0) & (np.arange(batch) < count)[:, None]
        blocks = np.take_along_axis(tables, np.maximum(positions, 0) // block_size, axis=1)
        blocks = np.where(written, blocks, self._num_blocks)
        slots = np.stack([blocks, positions % block_size], axis=-1).reshape(-1, 2)
        return {
            "input_ids": input_ids,
            "positions": positions.astype(np.int32),
            "block_tables": tables,
            "slot_mapping": slots.astype(np.int64),
            "logit_rows": np.array([i * length + pieces[i].length - 1 for i in sampling], np.int64),
        }

    def _clear_new_tails(self, rows: Sequence[StepRow]) -> None:
        """Zero each block that a row begins in this step and does not fill."""
        block_size = self._spec.block_size
        begun = []
        for row in rows:
            end = row.context_len + len(row.token_ids)
            last = (end - 1) // block_size
            if last * block_size >= row.context_len and end % block_size:
                begun.append(row.block_table[last])
        if begun:
            for pool in self._pools:
                pool[begun] = 0


def _check_runtime(engine: EngineDir) -> None:
    manifest = engine.manifest
    if manifest.target != TARGET:
        raise EngineMismatchError(
            mismatch(engine.path, f"built for {manifest.target!r}, not for {TARGET!r}")
        )
    built, running = manifest.versions.get("onnxruntime", "none"), ort.__version__
    if built.split(".")[:2] != running.split(".")[:2]:
        raise EngineMismatchError(
            mismatch(engine.path, f"built for ONNX Runtime {built}, this is {running}")
        )
