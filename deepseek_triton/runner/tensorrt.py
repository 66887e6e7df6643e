"""ModelRunner on a TensorRT or TensorRT-RTX engine.

    rows ──CallPlanner──▶ calls ──▶ one copy to the device ──▶ engine ──▶ logits ──▶ sampler (host)
                                                                │
                                              new rows ──kernel──▶ KV pools, which the engine reads

The engine is pure: it returns the new KV rows, and a kernel writes them into the pools behind it.
All its contexts run on one stream and share one scratch memory. Prefill has a context of its own
that takes any shape; each shape of a decode call has a context and a CUDA graph of the engine and
the write, recorded after the first call of that shape: a graph is only valid while its context
stays as it was. There are at most as many as the planner has shapes, some dozens.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.build.engine_dir import EngineDir, load_engine_dir, mismatch
from deepseek_triton.build.tensorrt import FLAVORS, MAX_ELEMENTS
from deepseek_triton.errors import ConfigError, EngineMismatchError
from deepseek_triton.kv_cache.spec import KVCacheSpec
from deepseek_triton.runner.base import StepResult, StepRow
from deepseek_triton.runner.sampler import sample, top_log_probs
from deepseek_triton.runner.tensorrt_calls import DECODE, PREFILL, Call, CallPlanner, CallShape
from deepseek_triton.runner.tensorrt_device import CudaDevice, Device

logger = logging.getLogger(__name__)

_INPUTS = ("input_ids", "positions", "context_lens", "last_token", "block_tables")


class TensorRTRunner:
    """Runs an engine directory built for "tensorrt" or "tensorrt_rtx"; implements ModelRunner."""

    def __init__(
        self,
        engine: EngineDir,
        *,
        num_blocks: int | Callable[[int], int],
        device: Device | None = None,
        use_graphs: bool = True,
    ) -> None:
        """Load the engine, allocate pools and buffers.

        `num_blocks` may be a function of the bytes that are free once the engine is loaded.

        Raises:
            EngineMismatchError: the engine is for another target, version or GPU.
            ConfigError: TensorRT or the GPU cannot be used, or memory is short.
        """
        manifest = engine.manifest
        if manifest.target not in FLAVORS or manifest.limits is None:
            raise EngineMismatchError(
                mismatch(engine.path, f"built for {manifest.target!r}, not for TensorRT")
            )
        trt = FLAVORS[manifest.target].load()
        self._spec = manifest.kv_cache
        self._vocab_size = manifest.model.vocab_size
        self._planner = CallPlanner(manifest.limits, self._spec.block_size)
        self._device: Device | None = device or CudaDevice()
        self._engine = _Engine(trt, engine, self._device)
        self._allocate_buffers()
        self._num_blocks = self._size_pools(num_blocks)
        self._allocate_pools()
        self._use_graphs = use_graphs
        self._prefill: Any = None
        self._decodes: dict[CallShape, _DecodeGraph] = {}
        self._device.synchronize()
        logger.info(
            "loaded %s: %d KV blocks, %.1f MiB",
            engine.path,
            self._num_blocks,
            self._spec.bytes_per_block * self._num_blocks / 2**20,
        )

    @classmethod
    def load(cls, path: Path, *, num_blocks: int) -> TensorRTRunner:
        """Verify the engine directory `path` and load it."""
        return cls(load_engine_dir(path), num_blocks=num_blocks)

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
        order, logits, overflowed = self._run(rows)
        token_ids = np.full(len(rows), -1, np.int32)
        log_probs = np.full(len(rows), np.nan, np.float32)
        samplings = [s for index in order if (s := rows[index].sampling) is not None]
        if samplings:
            token_ids[order], log_probs[order] = sample(logits, samplings)
        counts = [sampling.params.top_log_probs for sampling in samplings]
        found = dict(zip(order, top_log_probs(logits, counts), strict=False))
        tops = tuple(found.get(i, ()) for i in range(len(rows))) if found else ()
        return StepResult(token_ids, log_probs, top_log_probs=tops, overflowed=overflowed)

    def forward(self, rows: Sequence[StepRow]) -> tuple[list[int], NDArray[np.float32]]:
        """Run the model; return the indices of the sampling rows and their logits [n, V].

        Mutates the pools.
        """
        return self._run(rows)[:2]

    def _run(
        self, rows: Sequence[StepRow]
    ) -> tuple[list[int], NDArray[np.float32], tuple[int, ...]]:
        """As `forward`, and the rows with a token whose hidden states overflowed."""
        order: list[int] = []
        parts: list[NDArray[np.float32]] = []
        overflowed: set[int] = set()
        for call in self._planner.plan(rows):
            wanted = [
                i
                for i, piece in enumerate(call.pieces)
                if piece.is_last and rows[piece.row].sampling is not None
            ]
            logits, norms = self._call(call, rows, fetch=bool(wanted))
            order += [call.pieces[i].row for i in wanted]
            parts.append(logits[wanted])  # a copy: the buffer is used again
            overflowed.update(
                piece.row
                for piece, own in zip(call.pieces, norms, strict=False)
                if not np.isfinite(own[: piece.length]).all()
            )
        return order, np.concatenate(parts), tuple(sorted(overflowed))

    def close(self) -> None:
        """Free the model and the pools; idempotent."""
        self._decodes, self._prefill = {}, None
        if self._device is not None:
            self._device.synchronize()
            self._engine.close()
            self._device.close()
            self._device = None

    def _allocate_buffers(self) -> None:
        """Allocate what every call uses, for the largest of them."""
        device, shapes = self._open_device(), self._planner.largest()
        self._host = device.pinned((max(shape.size for shape in shapes),), np.int32)
        self._arrays = device.allocate(self._host.nbytes)
        batch = max(shape.batch for shape in shapes)
        self._host_logits = device.pinned((batch, self._vocab_size), np.float32)
        self._logits = device.allocate(self._host_logits.nbytes)
        row_bytes = self._spec.width * self._spec.itemsize
        tokens = max(shape.num_tokens for shape in shapes)
        self._host_norms = device.pinned((tokens,), np.float32)
        self._norms = device.allocate(self._host_norms.nbytes)
        self._new_rows = {
            name: device.allocate(tokens * row_bytes) for name in self._engine.row_outputs
        }

    def _size_pools(self, num_blocks: int | Callable[[int], int]) -> int:
        """Return the number of KV blocks, at most what one tensor may hold; ConfigError for < 1."""
        most = MAX_ELEMENTS // (self._spec.block_size * self._spec.width) - 1
        free = self._open_device().free_memory()
        wanted = num_blocks if isinstance(num_blocks, int) else min(num_blocks(free), most)
        if not 1 <= wanted <= most:
            raise ConfigError(f"num_blocks: {wanted} is not in 1 ... {most}")
        return wanted

    def _allocate_pools(self) -> None:
        device, spec = self._open_device(), self._spec
        # One more, which pads block tables: it stays zero.
        nbytes = (self._num_blocks + 1) * spec.block_size * spec.width * spec.itemsize
        pools = {name: device.allocate(nbytes) for name in self._engine.pool_inputs}
        self._pool_addresses = self._address_array(list(pools.values()))
        self._row_addresses = self._address_array(list(self._new_rows.values()))
        outputs = {"logits": self._logits, "squared_norms": self._norms}
        self._fixed = {**pools, **self._new_rows, **outputs}

    def _address_array(self, addresses: list[int]) -> int:
        """Return the device address of an array of addresses."""
        device = self._open_device()
        host = device.pinned((len(addresses),), np.uint64)
        host[:] = addresses
        place = device.allocate(host.nbytes)
        device.upload(place, host)
        return place

    def _call(
        self, call: Call, rows: Sequence[StepRow], *, fetch: bool
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Run one call; return views of logits [b, V] of its pieces, if `fetch`, and norms [B, S].

        Norms are the squared ones of the hidden states (export/portable.py).
        """
        device, shape = self._open_device(), call.shape
        self._planner.fill(call, rows, self._host, self._num_blocks)
        device.upload(self._arrays, self._host[: shape.size])
        if shape.profile == DECODE:
            self._decode(shape)
        else:
            if self._prefill is None:
                self._prefill = self._engine.new_context(PREFILL)
            self._bind(self._prefill, shape)
            self._execute(self._prefill, shape)
        logits = self._host_logits[: len(call.pieces)]
        if fetch:
            device.download(logits, self._logits)
        norms = self._host_norms[: shape.num_tokens]
        device.download(norms, self._norms)
        device.synchronize()  # the host arrays are written again by the next call
        return logits, norms.reshape(shape.batch, shape.length)

    def _decode(self, shape: CallShape) -> None:
        device = self._open_device()
        known = self._decodes.get(shape)
        if known is None:
            context = self._engine.new_context(DECODE)
            self._bind(context, shape)
            known = self._decodes[shape] = _DecodeGraph(context)
        if known.graph is not None:
            device.launch(known.graph)
            return
        self._execute(known.context, shape)
        # The first run of a shape prepares what must not happen while a graph is recorded.
        if self._use_graphs and self._engine.can_record(known.context):
            known.graph = device.record(lambda: self._execute(known.context, shape))

    def _bind(self, context: Any, shape: CallShape) -> None:
        """Tell `context` shapes and addresses of a call."""
        spec, layout = self._spec, shape.layout()
        pool_shape = (self._num_blocks + 1, spec.block_size, spec.width)
        shapes = {name: layout[name][1] for name in _INPUTS}
        shapes |= dict.fromkeys(self._engine.pool_inputs, pool_shape)
        itemsize = self._host.itemsize
        addresses = {name: self._arrays + layout[name][0] * itemsize for name in _INPUTS}
        self._engine.bind(context, shapes, addresses | self._fixed)

    def _execute(self, context: Any, shape: CallShape) -> None:
        """Put the engine and the write of its new rows into the stream."""
        device, layout = self._open_device(), shape.layout()
        if not context.execute_async_v3(device.stream):
            raise RuntimeError("TensorRT could not run the engine; the log above says why")
        slots, tails = (
            self._arrays + layout[name][0] * self._host.itemsize for name in ("slots", "tails")
        )
        counts = (shape.num_tokens, len(self._new_rows))
        row_bytes = self._spec.width * self._spec.itemsize
        device.write_rows(
            self._pool_addresses, self._row_addresses, counts, slots, tails, row_bytes
        )

    def _open_device(self) -> Device:
        if self._device is None:
            raise RuntimeError("the runner is closed")
        return self._device


@dataclass
class _DecodeGraph:
    """A context bound to one shape, and what was recorded of it."""

    context: Any
    graph: Any = None


class _Engine:
    """A deserialized engine, its tensors, and scratch memory that its contexts share."""

    def __init__(self, trt: Any, engine: EngineDir, device: Device) -> None:
        self._trt = trt
        self._device = device
        self._logger = trt.Logger(trt.Logger.WARNING)
        self._runtime = trt.Runtime(self._logger)
        self._engine = _deserialize(self._runtime, engine, trt)
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        self.pool_inputs = [name for name in names if "_pool." in name]
        # In the same order: kv_pool.3 and new_kv.3.
        self.row_outputs = ["new_" + name.replace("_pool", "") for name in self.pool_inputs]
        expected = {*_INPUTS, *self.pool_inputs, *self.row_outputs, "logits", "squared_norms"}
        if set(names) != expected:
            odd = sorted(expected.symmetric_difference(names))
            raise EngineMismatchError(mismatch(engine.path, f"unexpected tensors {odd}"))
        sizes = [self._engine.get_device_memory_size_for_profile_v2(i) for i in (PREFILL, DECODE)]
        self._scratch_size = max(sizes)
        self._scratch = device.allocate(self._scratch_size)

    def new_context(self, profile: int) -> Any:
        """Return an execution context of an optimization profile, in the shared scratch memory."""
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise ConfigError("TensorRT cannot create an execution context; GPU memory is short")
        context.set_device_memory(self._scratch, self._scratch_size)
        if not context.set_optimization_profile_async(profile, self._device.stream):
            raise RuntimeError(f"TensorRT cannot use optimization profile {profile}")
        return context

    def bind(
        self, context: Any, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]
    ) -> None:
        """Set the shape of every input and the address of every tensor."""
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise RuntimeError(f"TensorRT does not take {name} of shape {shape}")
        for name, address in addresses.items():
            if not context.set_tensor_address(name, address):
                raise RuntimeError(f"TensorRT does not take the address of {name}")

    def can_record(self, context: Any) -> bool:
        """Whether a CUDA graph may be recorded; TensorRT-RTX tells, TensorRT always can."""
        ask = getattr(context, "is_stream_capturable", None)
        return ask is None or bool(ask(self._device.stream))

    def close(self) -> None:
        """Free the engine; its contexts must be gone."""
        self._engine = self._runtime = None


def _deserialize(runtime: Any, engine: EngineDir, trt: Any) -> Any:
    with (
        engine.model_path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        loaded = runtime.deserialize_cuda_engine(content)
    if loaded is None:
        versions = engine.manifest.versions
        built = ", ".join(f"{k} {v}" for k, v in versions.items() if k.startswith("tensorrt"))
        raise EngineMismatchError(
            mismatch(
                engine.path,
                f"built with {built}; {trt.__name__} {trt.__version__} refuses it on this GPU "
                "(its log says why)",
            )
        )
    return loaded
