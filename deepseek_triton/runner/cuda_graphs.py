"""Decode steps as CUDA graphs: one for each bucket of batch size and context length.

A graph replays hundreds of kernels for the cost of one launch, but with fixed addresses and grids.
So each bucket has buffers of its own, a batch is padded to its bucket with rows that write and read
nothing, and what attention must know of a row's length it reads on the device. The context bucket
only fixes how wide the block table is, by which attention chooses how many ways to split the keys.
All graphs are captured when the engine starts and share one memory pool; none is made later.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from deepseek_triton.runner.base import StepRow
from deepseek_triton.runner.cuda_batch import DecodeArrays, decode_size
from deepseek_triton.runner.cuda_step import Decode, Step

logger = logging.getLogger(__name__)

Forward = Callable[[Step], Tensor]
Finish = Callable[[Tensor], Tensor]

_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_FIRST_CONTEXT = 2048  # tokens
_CONTEXT_STEP = 8


def batch_buckets(max_batch: int) -> tuple[int, ...]:
    """Return ascending batch sizes that end with `max_batch`."""
    return (*(b for b in _BATCHES if b < max_batch), max_batch)


def block_buckets(max_context_len: int, block_size: int) -> tuple[int, ...]:
    """Return ascending block table widths; the last holds `max_context_len` tokens."""
    widths, tokens = [], _FIRST_CONTEXT
    while tokens < max_context_len:
        widths.append(-(-tokens // block_size))
        tokens *= _CONTEXT_STEP
    return (*widths, -(-max_context_len // block_size))


class DecodeBuckets:
    """Runs decode rows in the smallest bucket that holds them."""

    def __init__(
        self,
        forward: Forward,
        finish: Finish,
        pools: dict[str, Tensor],
        *,
        max_batch: int,
        max_context_len: int,
        device: torch.device,
        capture: bool,
    ) -> None:
        """`forward` gives logits [B, V] of a step, `finish` what is fetched of them every time.

        Without `capture` buckets are run call by call: for comparison, and where there is no CUDA.
        """
        self._block_size = next(iter(pools.values())).shape[1]
        self._batches = batch_buckets(max_batch)
        self._widths = block_buckets(max_context_len, self._block_size)
        self._buckets = {
            (batch, width): _Bucket(forward, finish, pools, batch, width, device)
            for batch in self._batches
            for width in self._widths
        }
        if capture:
            self._capture(device)

    def run(self, rows: Sequence[StepRow]) -> tuple[Tensor, Tensor]:
        """Run rows of one token each; return logits [n, V] and what `finish` made of the bucket.

        Both are overwritten by the next run of the bucket. Mutates the pools.
        """
        blocks = max(row.context_len // self._block_size + 1 for row in rows)
        batch = self._batches[bisect_left(self._batches, len(rows))]
        width = self._widths[bisect_left(self._widths, blocks)]
        return self._buckets[batch, width].run(rows, self._block_size)

    def _capture(self, device: torch.device) -> None:
        # The largest first: the others then fit into the memory that it took.
        largest_first = sorted(self._buckets.values(), key=lambda b: b.size, reverse=True)
        stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream):
            for bucket in tqdm(largest_first, desc="capture CUDA graphs", disable=None):
                bucket.capture(stream, pool)
        torch.cuda.synchronize(device)
        logger.info("captured %d CUDA graphs", len(largest_first))


class _Bucket:
    """Fixed buffers for `batch` rows of up to `width` blocks, and the graph that reads them."""

    def __init__(
        self,
        forward: Forward,
        finish: Finish,
        pools: dict[str, Tensor],
        batch: int,
        width: int,
        device: torch.device,
    ) -> None:
        self._forward, self._finish = forward, finish
        self.size = batch * width
        size = decode_size(batch, width)
        pinned = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self._arrays = DecodeArrays(self._host.numpy(), batch, width)
        self._device_buffer = self._host.to(device)
        ids, positions, slots, context_lens = self._device_buffer[: 4 * batch].view(4, batch)
        tables = self._device_buffer[4 * batch :].view(batch, width)
        attention = Decode(tables, context_lens)
        self._step = Step(ids, positions, slots, None, attention, pools)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[Tensor, Tensor] | None = None

    def capture(self, stream: torch.cuda.Stream, pool: object) -> None:
        """Record the step; padding rows alone, so that the pools stay as they are."""
        self._arrays.clear()
        self._device_buffer.copy_(self._host)
        self._compute()  # compiles kernels and creates handles, which a capture must not
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            self._outputs = self._compute()
        self._graph = graph

    def run(self, rows: Sequence[StepRow], block_size: int) -> tuple[Tensor, Tensor]:
        self._arrays.fill(rows, block_size)
        self._device_buffer.copy_(self._host, non_blocking=True)
        if self._graph is None:
            logits, finished = self._compute()
        else:
            self._graph.replay()
            logits, finished = self._outputs  # type: ignore[misc]
        return logits[: len(rows)], finished

    def _compute(self) -> tuple[Tensor, Tensor]:
        logits = self._forward(self._step)
        return logits, self._finish(logits)
