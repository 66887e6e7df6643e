"""What runs in each step: token counts and KV blocks only, never tensors.

    add ─▶ waiting (oldest first) ──admit──▶ running (oldest first) ──remove─▶ blocks free
               ▲── front ◀── preempt the youngest ──┘

Every step is formed anew (in-flight batching): first one token for each decoding request, then the
next chunk of running prefills, then waiting requests, within max_tokens_per_step. All running
requests are older than all waiting ones, so the oldest request always makes progress: it may take
the blocks of every younger one, and `add` refuses what would not fit into the whole pool.

A decoding request may bring drafts, guesses of the tokens that follow its last one: they run in the
same step if budget and free blocks allow, and nobody is preempted for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.config import SchedulerConfig, label
from deepseek_triton.errors import InvalidRequestError, OverloadedError
from deepseek_triton.kv_cache.block_pool import BlockPool
from deepseek_triton.kv_cache.block_table import BlockTable
from deepseek_triton.kv_cache.spec import KVCacheSpec
from deepseek_triton.request import RequestKey

NONE: Mapping[RequestKey, int] = MappingProxyType({})


@dataclass(frozen=True)
class ScheduledRow:
    """One request's share of a step."""

    request_key: RequestKey
    context_len: int  # tokens already in the cache
    num_tokens: int  # ≥ 1 known tokens to compute, from position context_len on
    block_table: NDArray[np.int32]  # [m] holds all tokens up to these and the drafts; read-only
    samples: bool  # whether these reach the last known token, so that the next one can be drawn
    num_drafts: int = 0  # drafts to compute after them


@dataclass(frozen=True)
class ScheduledStep:
    """Decodes first. No rows: nothing to do."""

    rows: tuple[ScheduledRow, ...]
    preempted: tuple[RequestKey, ...]  # lost their KV blocks in this step and wait again


@dataclass(eq=False)
class Progress:
    """How far one request is. Owned by the Scheduler; others read it."""

    request_key: RequestKey
    arrival: int  # order of `add`
    num_tokens: int  # prompt and output tokens known so far
    max_cached: int  # tokens in the cache when the request ends by length: its last is never fed
    num_cached: int = 0  # tokens whose KV is in the cache
    num_drafts: int = 0  # guesses of the tokens after the known ones, for the next step
    running: bool = False
    block_table: BlockTable = field(default_factory=BlockTable)
    blocks_allocated: int = 0  # in total, preemptions included
    preemptions: int = 0

    @property
    def remaining(self) -> int:
        """Known tokens whose KV is still to be computed; 1 while decoding."""
        return self.num_tokens - self.num_cached


@dataclass
class _Plan:
    """A step being formed."""

    budget: int  # tokens that it may still take
    counts: dict[RequestKey, int] = field(default_factory=dict)  # known tokens
    drafts: dict[RequestKey, int] = field(default_factory=dict)
    preempted: list[RequestKey] = field(default_factory=list)


def check_fits(spec: KVCacheSpec, num_blocks: int, num_prompt_tokens: int, max_tokens: int) -> None:
    """Raise InvalidRequestError if such a request could never run in `num_blocks` KV blocks."""
    # The last token is never written to the cache.
    if spec.blocks_for(num_prompt_tokens + max_tokens - 1) > num_blocks:
        raise InvalidRequestError(
            "max_tokens",
            f"a prompt of {num_prompt_tokens} tokens and max_tokens {max_tokens} exceed the KV "
            f"cache, which holds {num_blocks * spec.block_size + 1} tokens of one request; shorten "
            f"them, or raise the server's {label('kv_cache_num_blocks')}",
        )


class Scheduler:
    """First come, first served. Not thread-safe: one thread calls it."""

    def __init__(
        self, config: SchedulerConfig, spec: KVCacheSpec, num_blocks: int, *, ahead: bool = False
    ) -> None:
        """With `ahead`, a row gets a block for the token after its last one too, if one is free."""
        self._config = config
        self._ahead = ahead
        self._spec = spec
        self._pool = BlockPool(num_blocks)
        self._progress: dict[RequestKey, Progress] = {}
        self._waiting: deque[Progress] = deque()
        self._running: list[Progress] = []
        self._arrivals = 0
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Requests that hold no KV blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def num_blocks(self) -> int:
        """KV blocks of the pool."""
        return self._pool.num_blocks

    @property
    def num_blocks_used(self) -> int:
        """KV blocks that requests hold."""
        return self._pool.num_used

    def add(self, request_key: RequestKey, num_prompt_tokens: int, max_tokens: int) -> None:
        """Put a request at the end of the queue.

        Raises InvalidRequestError for a key in use or a request that can never fit, OverloadedError
        when max_waiting requests wait beyond those that run.
        """
        if request_key in self._progress:
            raise InvalidRequestError("request_key", f"{request_key} is in use by another request")
        check_fits(self._spec, self._pool.num_blocks, num_prompt_tokens, max_tokens)
        limit = self._config.max_batch_size + self._config.max_waiting
        if len(self._progress) >= limit:
            raise OverloadedError(f"{limit} requests run or wait already; try again later")
        entry = Progress(
            request_key=request_key,
            arrival=self._arrivals,
            num_tokens=num_prompt_tokens,
            max_cached=num_prompt_tokens + max_tokens - 1,
        )
        self._arrivals += 1
        self._progress[request_key] = entry
        self._waiting.append(entry)

    def progress(self, request_key: RequestKey) -> Progress:
        """Return how far a request is; raises KeyError for an unknown one."""
        return self._progress[request_key]

    def schedule(self) -> ScheduledStep:
        """Form the next step and take the KV blocks that it writes to.

        The step must be run and then committed; when it was not run, scheduling again is safe.
        """
        plan = _Plan(budget=self._config.max_tokens_per_step)
        decodes = [entry for entry in self._running if entry.remaining == 1]
        prefills = [entry for entry in self._running if entry.remaining > 1]
        for entry in (*decodes, *prefills):
            self._plan_tokens(entry, plan)
        self._admit(plan)
        if self._ahead:
            self._look_ahead(plan)
        rows = tuple(
            self._row(self._progress[key], count, plan.drafts.get(key, 0))
            for key, count in plan.counts.items()
        )
        return ScheduledStep(rows, tuple(plan.preempted))

    def commit(
        self,
        step: ScheduledStep,
        accepted: Mapping[RequestKey, int] = NONE,
        drafts: Mapping[RequestKey, int] = NONE,
    ) -> None:
        """Record that `step` ran: its tokens are cached, and each sampling row has one token more.

        `accepted` counts the drafts of this step that proved right: they are cached and known too;
        what the others left in the cache is overwritten. `drafts` counts those for the next step.
        Rows of requests removed since `schedule` are ignored.
        """
        for row in step.rows:
            entry = self._progress.get(row.request_key)
            if entry is not None:
                right = accepted.get(row.request_key, 0)
                entry.num_cached = row.context_len + row.num_tokens + right
                entry.num_tokens += row.samples + right
                entry.num_drafts = drafts.get(row.request_key, 0)

    def remove(self, request_key: RequestKey) -> None:
        """Forget a request, finished or not, and free its blocks; raises KeyError if unknown."""
        entry = self._progress.pop(request_key)
        if entry.running:
            self._running.remove(entry)
            self._pool.free(entry.block_table.clear())
        else:
            self._waiting.remove(entry)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every invariant between two steps holds."""
        self._pool.check_integrity([e.block_table.ids.tolist() for e in self._running])
        queue = [*self._running, *self._waiting]
        if [e.arrival for e in queue] != sorted(e.arrival for e in queue):
            raise AssertionError("running and waiting requests are not in order of arrival")
        if {e.request_key for e in queue} != set(self._progress) or len(queue) != len(
            self._progress
        ):
            raise AssertionError("a request is neither running nor waiting, or both")
        if len(self._running) > self._config.max_batch_size:
            raise AssertionError("more requests run than max_batch_size allows")
        for e in queue:
            if e.running != (e in self._running) or not (
                0 <= e.num_cached <= len(e.block_table) * self._spec.block_size
                and e.num_cached < e.num_tokens <= e.max_cached + 1
            ):
                raise AssertionError(f"inconsistent: {e}")

    def _row(self, entry: Progress, count: int, num_drafts: int) -> ScheduledRow:
        return ScheduledRow(
            request_key=entry.request_key,
            context_len=entry.num_cached,
            num_tokens=count,
            block_table=entry.block_table.ids,
            samples=count == entry.remaining,
            num_drafts=num_drafts,
        )

    def _plan_tokens(self, entry: Progress, plan: _Plan) -> None:
        """Plan the next tokens of a running request, preempting younger ones if it has no block.

        The youngest one, when no block is left, keeps what it has and sits this step out.
        """
        wanted = min(entry.remaining, plan.budget)
        if not entry.running or wanted == 0:
            return
        while (count := self._grow(entry, wanted)) == 0:
            if self._running[-1] is entry:
                return
            self._preempt(self._running[-1], plan)
        plan.counts[entry.request_key] = count
        plan.budget -= count
        # The last token that a request may have is never fed, so it is no use to guess it twice.
        room = entry.max_cached - entry.num_cached - count
        if drafts := min(entry.num_drafts, plan.budget, room) if count == entry.remaining else 0:
            plan.drafts[entry.request_key] = self._grow(entry, count + drafts) - count
            plan.budget -= plan.drafts[entry.request_key]

    def _look_ahead(self, plan: _Plan) -> None:
        """Take free blocks for the step after, once all rows of this one have theirs."""
        for key, count in plan.counts.items():
            entry = self._progress[key]
            planned = count + plan.drafts.get(key, 0)
            if count == entry.remaining and entry.num_cached + planned < entry.max_cached:
                self._grow(entry, planned + 1)

    def _grow(self, entry: Progress, wanted: int) -> int:
        """Give `entry` free blocks for up to `wanted` tokens more; return how many tokens fit."""
        held = len(entry.block_table)
        missing = self._spec.blocks_for(entry.num_cached + wanted) - held
        if missing <= 0:
            return wanted
        blocks = self._pool.allocate(min(missing, self._pool.num_free))
        if blocks:
            entry.block_table.append(blocks)
            entry.blocks_allocated += len(blocks)
        room = len(entry.block_table) * self._spec.block_size - entry.num_cached
        return min(wanted, room)

    def _preempt(self, victim: Progress, plan: _Plan) -> None:
        """Move the youngest running request back to the front of the queue, to be recomputed."""
        self._running.remove(victim)
        self._pool.free(victim.block_table.clear())
        victim.running = False
        victim.num_cached = victim.num_drafts = 0
        victim.preemptions += 1
        self._waiting.appendleft(victim)
        self.num_preemptions += 1
        plan.preempted.append(victim.request_key)
        for counts in (plan.counts, plan.drafts):
            plan.budget += counts.pop(victim.request_key, 0)

    def _admit(self, plan: _Plan) -> None:
        """Start waiting requests, oldest first, while the batch, the budget and the blocks allow.

        A request starts only if all its tokens fit beside what the running ones need soon:
        otherwise the next decode would preempt it again.
        """
        if not self._waiting:
            return
        reserved = sum(self._reserve(entry) for entry in self._running)
        while self._waiting and len(self._running) < self._config.max_batch_size and plan.budget:
            entry = self._waiting[0]
            needed = self._spec.blocks_for(entry.num_tokens)
            if self._running and needed + reserved > self._pool.num_free:
                return
            self._waiting.popleft()
            entry.running = True
            self._running.append(entry)
            self._plan_tokens(entry, plan)
            reserved += self._reserve(entry)

    def _reserve(self, entry: Progress) -> int:
        """Blocks that a running request still lacks for its known tokens, and one to go on with."""
        soon = self._spec.blocks_for(entry.num_tokens) + 1
        return max(0, min(soon, self._spec.blocks_for(entry.max_cached)) - len(entry.block_table))
