"""Steps as CUDA graphs: one for each bucket of batch size and context, or of prompt tokens.

A graph replays hundreds of kernels for the cost of one launch, but with fixed addresses and grids.
So each bucket has buffers of its own, a step is padded to its bucket with tokens that write and
read nothing, and what attention must know of a row's length it reads on the device. The context
bucket only fixes how wide the block table is, by which attention chooses how many ways to split the
keys. All graphs are captured when the engine starts; none is made later. They share one memory
pool: what a graph returns holds until another one runs.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from deepseek_triton.runner.base import StepRow
from deepseek_triton.runner.cuda_ahead import FutureTokens
from deepseek_triton.runner.cuda_batch import (
    DecodeArrays,
    PackedPrompts,
    decode_size,
    prompts_size,
)
from deepseek_triton.runner.cuda_device import Mark
from deepseek_triton.runner.cuda_step import Decode, Prefill, Step

logger = logging.getLogger(__name__)

Outputs = tuple[Tensor, ...]
"""Logits [R, V], what is fetched of them every time, and hidden states [T, D] if there are any."""
Compute = Callable[[Step], Outputs]

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PROMPT_BUCKETS = (
    *((tokens, 16) for tokens in (64, 128, 256, 384, 512, 768, 1024)),
    *((tokens, 64) for tokens in (1536, 2048, 3072, 4096)),
)
"""Tokens and rows. Launching the kernels of a step one by one takes the host about 50 ms, which the
device needs for some 4,096 tokens."""
_FIRST_CONTEXT = 2048  # tokens
_CONTEXT_STEP = 8


def batch_buckets(max_batch: int) -> tuple[int, ...]:
    """Return ascending batch sizes that end with `max_batch`."""
    return (*(b for b in BATCHES if b < max_batch), max_batch)


def block_buckets(max_context_len: int, block_size: int) -> tuple[int, ...]:
    """Return ascending block table widths; the last holds `max_context_len` tokens."""
    widths, tokens = [], _FIRST_CONTEXT
    while tokens < max_context_len:
        widths.append(-(-tokens // block_size))
        tokens *= _CONTEXT_STEP
    return (*widths, -(-max_context_len // block_size))


class FixedStep:
    """A step in buffers of its own, and its graph once it is captured."""

    def __init__(
        self, size: int, device: torch.device, compute: Compute, *, overlap: bool = False
    ) -> None:
        """`size` numbers travel to the device each time; `overlap`: kernels may start early."""
        self.size = size
        self._overlap = overlap
        self.host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.buffer = self.host.to(device)
        self.step: Step | None = None  # over views of `buffer`; set once by the owner
        self._compute = compute
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Outputs | None = None
        self.sent = Mark(device)  # until it is reached, `host` must stay as it is

    def capture(self, stream: torch.cuda.Stream, pool: object) -> None:
        """Record the step; `host` holds padding alone, so that the KV pools stay as they are."""
        self.buffer.copy_(self.host)
        self._run()  # compiles kernels and creates handles, which a capture must not
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            self._outputs = self._run()
        self._graph = graph

    def run(self, future: FutureTokens | None = None) -> Outputs:
        """Run the step that `host` describes; the result holds until another graph runs.

        With `future`, the token ids in `host` are places among its tokens.
        """
        self.buffer.copy_(self.host, non_blocking=True)
        self.sent.set()
        if future is not None and self.step is not None:
            future.fill(self.step.input_ids)
        if self._graph is None or self._outputs is None:
            return self._run()
        self._graph.replay()
        return self._outputs

    def _run(self) -> Outputs:
        if self.step is None:
            raise RuntimeError("a fixed step without a step")
        if not self.buffer.is_cuda:
            return self._compute(self.step)
        from deepseek_triton.kernels.launch import launches_in_turn

        with launches_in_turn(not self._overlap):
            return self._compute(self.step)


def capture_all(steps: Sequence[FixedStep], device: torch.device) -> None:
    """Capture every step into one memory pool."""
    # The largest first: the others then fit into the memory that it took.
    largest_first = sorted(steps, key=lambda step: step.size, reverse=True)
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for step in tqdm(largest_first, desc="capture CUDA graphs", disable=None):
            step.capture(stream, pool)
    torch.cuda.synchronize(device)
    logger.info("captured %d CUDA graphs", len(steps))


class DecodeBuckets:
    """Runs rows of one token each in the smallest bucket that holds them."""

    def __init__(
        self,
        compute: Compute,
        pools: dict[str, Tensor],
        *,
        max_batch: int,
        max_context_len: int,
        device: torch.device,
        hidden: Tensor | None = None,
    ) -> None:
        """`hidden` [max_batch, D] is what a draft model reads: it is filled before each run."""
        self._block_size = next(iter(pools.values())).shape[1]
        self._batches = batch_buckets(max_batch)
        self._widths = block_buckets(max_context_len, self._block_size)
        self._buckets: dict[tuple[int, int], tuple[FixedStep, DecodeArrays]] = {}
        for batch in self._batches:
            for width in self._widths:
                size = decode_size(batch, width)
                fixed = FixedStep(size, device, compute, overlap=batch == 1)
                ids, positions, slots, lens = fixed.buffer[: 4 * batch].view(4, batch)
                tables = fixed.buffer[4 * batch :].view(batch, width)
                states = None if hidden is None else hidden[:batch]
                attention = Decode(tables, lens)
                fixed.step = Step(ids, positions, slots, None, attention, pools, states)
                arrays = DecodeArrays(fixed.host.numpy(), batch, width)
                self._buckets[batch, width] = (fixed, arrays)

    @property
    def steps(self) -> list[FixedStep]:
        """All of them, to be captured."""
        return [fixed for fixed, _ in self._buckets.values()]

    def run(self, rows: Sequence[StepRow], future: FutureTokens | None = None) -> Outputs:
        """Return logits [n, V], and the rest of the outputs of the whole bucket. Mutates the pools.

        All hold until the next run of any bucket. `future` has the rows' tokens if the host has
        not.
        """
        blocks = max(row.context_len // self._block_size + 1 for row in rows)
        batch = self._batches[bisect_left(self._batches, len(rows))]
        width = self._widths[bisect_left(self._widths, blocks)]
        fixed, arrays = self._buckets[batch, width]
        fixed.sent.wait()
        arrays.fill(rows, self._block_size)
        if future is not None:
            arrays.token_ids[: len(rows)] = future.places
        logits, *rest = fixed.run(future)
        return logits[: len(rows)], *rest


class PromptBuckets:
    """Runs short whole prompts, packed one after another, in the smallest bucket that holds them.

    At these sizes the host would need longer to launch the kernels than the device to run them.
    """

    def __init__(self, compute: Compute, pools: dict[str, Tensor], device: torch.device) -> None:
        self._block_size = next(iter(pools.values())).shape[1]
        self._buckets: list[tuple[FixedStep, PackedPrompts]] = []
        for tokens, num_rows in PROMPT_BUCKETS:
            fixed = FixedStep(prompts_size(tokens, num_rows), device, compute)
            ids, positions, slots = fixed.buffer[: 3 * tokens].view(3, tokens)
            rest = fixed.buffer[3 * tokens :]
            lens, logit_rows = rest.split((num_rows + 1, num_rows))
            # One length for all rows: it only bounds the grid of attention.
            attention = Prefill((tokens,), (tokens,), lens, lens, None)
            fixed.step = Step(ids, positions, slots, logit_rows, attention, pools)
            arrays = PackedPrompts(fixed.host.numpy(), tokens, num_rows)
            self._buckets.append((fixed, arrays))

    @property
    def steps(self) -> list[FixedStep]:
        """All of them, to be captured."""
        return [fixed for fixed, _ in self._buckets]

    def hold(self, rows: Sequence[StepRow]) -> bool:
        """Whether these rows can run here."""
        return _bucket(rows) < len(PROMPT_BUCKETS) and not any(row.context_len for row in rows)

    def run(self, rows: Sequence[StepRow]) -> Outputs:
        """As DecodeBuckets.run, for rows that `hold`."""
        fixed, arrays = self._buckets[_bucket(rows)]
        fixed.sent.wait()
        arrays.fill(rows, self._block_size)
        logits, *rest = fixed.run()
        return logits[: len(rows)], *rest


def _bucket(rows: Sequence[StepRow]) -> int:
    """Return the first of PROMPT_BUCKETS that holds `rows`, len(PROMPT_BUCKETS) if none does."""
    tokens = sum(len(row.token_ids) for row in rows)
    fits = (
        i for i, (most, num) in enumerate(PROMPT_BUCKETS) if tokens <= most and len(rows) <= num
    )
    return next(fits, len(PROMPT_BUCKETS))
