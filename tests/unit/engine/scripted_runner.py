"""A ModelRunner without a model: its logits are a fixed function of a request's tokens.

It keeps a real block store and reads every earlier token back through the block table, so that a
wrong block table, a wrong context length or a lost KV block is an error in the very step.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.kv_cache.spec import KVCacheSpec
from deepseek_triton.request import RequestKey
from deepseek_triton.runner.base import Speculation, StepResult, StepRow
from deepseek_triton.runner.sampler import sample


class ScriptedRunner:
    """With `num_drafts`, it guesses up to that many tokens, of which about half are right."""

    def __init__(
        self, num_blocks: int, block_size: int = 4, vocab_size: int = 64, num_drafts: int = 0
    ) -> None:
        self.num_drafts = num_drafts
        self.vocab_size = vocab_size
        self.kv_cache_spec = KVCacheSpec(num_layers=1, width=1, block_size=block_size)
        self.num_blocks = num_blocks
        self.steps: list[tuple[StepRow, ...]] = []
        self.closed = False
        self.keep_steps = True
        # What a slot holds: the token, its position, and whose it is.
        self._tokens = np.full((num_blocks, block_size), -1, np.int32)
        self._positions = np.full((num_blocks, block_size), -1, np.int32)
        self._owners = np.full((num_blocks, block_size), "", object)

    def run(self, rows: tuple[StepRow, ...]) -> StepResult:
        if self.closed:
            raise RuntimeError("run after close")
        if self.keep_steps:
            self.steps.append(rows)
        keys = [row.request_key for row in rows]
        if not rows or len(set(keys)) != len(keys):
            raise RuntimeError(f"a step of {keys}")
        self._check_blocks_apart(rows)
        known = [self._write(row) for row in rows]
        token_ids = np.full(len(rows), -1, np.int32)
        log_probs = np.full(len(rows), np.nan, np.float32)
        speculation = []
        for i, row in enumerate(rows):
            drawn = self._draw(row, known[i]) if row.sampling is not None else []
            if drawn:
                token_ids[i], log_probs[i] = drawn[0]
            guesses = self._guess(row, known[i], [token for token, _ in drawn])
            more_ids = tuple(token for token, _ in drawn[1:])
            more_probs = tuple(log_prob for _, log_prob in drawn[1:])
            speculation.append(Speculation(more_ids, more_probs, guesses))
        return StepResult(token_ids, log_probs, tuple(speculation) if self.num_drafts else ())

    def logits(self, request_key: RequestKey, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """[vocab_size]; of the tokens alone unless a test overrides it."""
        digest = 0
        for token in tokens.tolist():
            digest = (digest * 1_000_003 + token + 1) % (1 << 61)
        generator = np.random.Generator(np.random.Philox(digest))
        return generator.normal(0.0, 2.0, self.vocab_size).astype(np.float32)

    def _draw(self, row: StepRow, known: NDArray[np.int32]) -> list[tuple[int, float]]:
        """One token after the known ones, and one after each draft that was drawn itself."""
        drawn: list[tuple[int, float]] = []
        first = len(known) - len(row.draft_token_ids)
        for count, sampling in enumerate((row.sampling, *row.draft_sampling)):
            logits = self.logits(row.request_key, known[: first + count])
            token_ids, log_probs = sample(logits[None], [sampling])
            drawn.append((int(token_ids[0]), float(log_probs[0])))
            if count == len(row.draft_token_ids) or drawn[-1][0] != row.draft_token_ids[count]:
                break
        return drawn

    def _guess(self, row: StepRow, known: NDArray[np.int32], drawn: list[int]) -> tuple[int, ...]:
        """What is likeliest after the tokens drawn; one more than it in every third place."""
        if not drawn or drawn[-1] < 0:
            return ()
        tokens = [*known[: len(known) - len(row.draft_token_ids)].tolist(), *drawn]
        guesses: list[int] = []
        for _ in range(self.num_drafts):
            context = np.array(tokens + guesses, np.int32)
            best = int(self.logits(row.request_key, context).argmax())
            guesses.append((best + (len(context) % 3 == 0)) % self.vocab_size)
        return tuple(guesses)

    def close(self) -> None:
        self.closed = True

    def _write(self, row: StepRow) -> NDArray[np.int32]:
        """Store the row's tokens; return all tokens of the request, read back from the store."""
        new_ids = [*row.token_ids.tolist(), *row.draft_token_ids]
        size, total = self.kv_cache_spec.block_size, row.context_len + len(new_ids)
        if len(row.token_ids) < 1 or len(row.block_table) * size < total:
            raise RuntimeError(f"{row}: {total} tokens do not fit")
        positions = np.arange(total)
        blocks, offsets = row.block_table[positions // size], positions % size
        new = slice(row.context_len, total)
        self._tokens[blocks[new], offsets[new]] = new_ids
        self._positions[blocks[new], offsets[new]] = positions[new]
        self._owners[blocks[new], offsets[new]] = row.request_key
        if not np.array_equal(self._positions[blocks, offsets], positions) or not np.all(
            self._owners[blocks, offsets] == row.request_key
        ):
            raise RuntimeError(f"{row}: the cache does not hold the first {row.context_len} tokens")
        return self._tokens[blocks, offsets]

    def _check_blocks_apart(self, rows: tuple[StepRow, ...]) -> None:
        blocks = np.concatenate([row.block_table for row in rows])
        if len(np.unique(blocks)) != len(blocks):
            raise RuntimeError("a block belongs to two rows")
        if blocks.min() < 0 or blocks.max() >= self.num_blocks:
            raise RuntimeError("a block id outside the pool")


class AheadRunner(ScriptedRunner):
    """A WaitingRunner: it computes `following`, KV blocks and all, before its `run` returns.

    So what a step that was launched too early would spoil is spoilt here, too.
    """

    def __init__(self, num_blocks: int, block_size: int = 4, vocab_size: int = 64) -> None:
        super().__init__(num_blocks, block_size, vocab_size)
        self.meanwhile = lambda: None
        self.num_launched = self.num_taken = 0  # rows
        self._launched: dict[tuple, tuple[StepRow, int, float]] = {}

    def run(self, rows: tuple[StepRow, ...], following=()) -> StepResult:
        launched, self._launched = self._launched, {}
        found = [launched.get((r.request_key, r.context_len, r.token_ids[0])) for r in rows]
        decodes = [i for i, row in enumerate(rows) if len(row.token_ids) == 1]
        if any(found[i] is None for i in decodes):
            found = [None] * len(rows)
        rest = [i for i in range(len(rows)) if found[i] is None]
        token_ids, log_probs = np.full(len(rows), -1, np.int32), np.full(len(rows), np.nan)
        if rest:
            result = super().run(tuple(rows[i] for i in rest))
            token_ids[rest], log_probs[rest] = result.token_ids, result.log_probs
        self.meanwhile()
        for i, known in enumerate(found):
            if known is not None:
                self._check_same(rows[i], known[0])
                token_ids[i], log_probs[i] = known[1:]
                self.num_taken += 1
        if following:
            self._launch(following, token_ids)
        return StepResult(token_ids, log_probs.astype(np.float32))

    def _launch(self, following, token_ids) -> None:
        inputs = np.maximum(token_ids[[each.source for each in following]], 0)
        rows = tuple(
            dataclasses.replace(each.row, token_ids=inputs[i : i + 1])
            for i, each in enumerate(following)
        )
        result = super().run(rows)
        self.num_launched += len(rows)
        for i, row in enumerate(rows):
            key = (row.request_key, row.context_len, inputs[i])
            self._launched[key] = (row, int(result.token_ids[i]), float(result.log_probs[i]))

    def _check_same(self, row: StepRow, early: StepRow) -> None:
        sampling, before = row.sampling, early.sampling
        blocks = self.kv_cache_spec.blocks_for(row.context_len + 1)
        same = np.array_equal(row.block_table[:blocks], early.block_table[:blocks])
        fields = ("params", "uniform", "banned_id", "more_banned_ids", "allowed")
        if not same or any(getattr(sampling, f) != getattr(before, f) for f in fields):
            raise RuntimeError(f"{row} was launched as {early}")


class Collector:
    """Takes outputs and checks what every stream promises."""

    def __init__(self) -> None:
        self.outputs: list = []

    def __call__(self, output) -> None:
        if self.outputs and self.outputs[-1].finish_reason is not None:
            raise RuntimeError(f"{output} after the last output")
        if output.index != len(self.outputs):
            raise RuntimeError(f"index {output.index} after {len(self.outputs)} outputs")
        self.outputs.append(output)
        if output.num_output_tokens != len(self.tokens):
            raise RuntimeError(f"num_output_tokens is {output.num_output_tokens}")

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def log_probs(self) -> list[float]:
        return [value for output in self.outputs for value in output.log_probs]

    @property
    def finish_reason(self):
        return self.outputs[-1].finish_reason if self.outputs else None
