"""ModelRunner on an NVIDIA GPU: the portable model with a kernel for each of its functions.

    rows ─┬─ one token each ─────────▶ CUDA graph of the batch size and context ─┐
          ├─ short whole prompts ────▶ CUDA graph of the number of tokens ───────┼─▶ sampled
          └─ other prompts, chunks ──▶ call by call ─────────────────────────────┘   on the device

Prompts are packed one row after another, without padding between them, and their attention is not
the absorbed form: keys and values of all heads are expanded from the latent rows, which costs
memory traffic once but 3.4 times fewer operations for each pair of tokens (192 + 128 rather than
576 + 512 numbers). Long ones are not captured: their kernels hide the time it takes to launch them.

Determinism: the same rows in the same order give the same bits. A row alone and in company may
differ in the last bits, since kernels split their sums by the shape of the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepseek_triton.build.engine_dir import EngineDir, mismatch
from deepseek_triton.errors import ConfigError, EngineMismatchError
from deepseek_triton.kv_cache.spec import KVCacheSpec
from deepseek_triton.request import TopLogProbs
from deepseek_triton.runner.acceptance import accept, by_row
from deepseek_triton.runner.base import (
    FollowingRow,
    RowScores,
    Speculation,
    StepResult,
    StepRow,
)
from deepseek_triton.runner.cuda_ahead import Ahead, Drawn, FutureTokens
from deepseek_triton.runner.cuda_device import (
    Mark,
    allocate_pools,
    free_memory,
    open_device,
    sent,
)
from deepseek_triton.runner.cuda_draft import MAX_TOKENS, Drafter, Hidden, one_token_rows
from deepseek_triton.runner.cuda_graphs import DecodeBuckets, Outputs, PromptBuckets, capture_all
from deepseek_triton.runner.cuda_model import CudaModel
from deepseek_triton.runner.cuda_operators import load_draft, load_model
from deepseek_triton.runner.cuda_program import read_program
from deepseek_triton.runner.cuda_sampling import (
    asks_for_more,
    choose,
    greedy,
    likeliest,
    refuse_overflowed,
    score,
    unpack,
)
from deepseek_triton.runner.cuda_step import Prefill, Step, packed_step
from deepseek_triton.runner.cuda_warm_up import warm_up

logger = logging.getLogger(__name__)

TARGET = "cuda"


def _nothing() -> None:
    """Do nothing: nobody has anything for the time that a step takes."""


class CudaRunner:
    """Runs an engine directory built for the target "cuda": a ScoringRunner and WaitingRunner."""

    def __init__(
        self,
        model: CudaModel,
        spec: KVCacheSpec,
        *,
        vocab_size: int,
        num_blocks: int | Callable[[int], int],
        max_batch_size: int,
        max_context_len: int,
        max_tokens_per_step: int = 256,
        use_graphs: bool = True,
        draft: CudaModel | None = None,
    ) -> None:
        """Allocate the pools and capture the graphs of a loaded `model`, and of its `draft`.

        `num_blocks` may be a function of the bytes that are free on the device.
        `max_batch_size` and `max_context_len` bound what decode rows may be; steps of up to
        `max_tokens_per_step` tokens find their kernels compiled.

        Raises:
            ConfigError: the device's memory does not suffice.
        """
        self.meanwhile: Callable[[], None] = _nothing
        self._device = model.device
        self._spec, self._vocab_size = spec, vocab_size
        self._model: CudaModel | None = model
        count = num_blocks if isinstance(num_blocks, int) else num_blocks(free_memory(self._device))
        if count < 1:
            raise ConfigError(f"num_blocks must be at least 1, not {count}")
        self._num_blocks = count
        names = model.pool_names + (draft.pool_names if draft is not None else [])
        self._pools = allocate_pools(spec, names, count, self._device)
        self._decoder: DecodeBuckets | None = DecodeBuckets(
            self._infer,
            self._pools,
            max_batch=max_batch_size * (1 if draft is None else MAX_TOKENS),
            max_context_len=max_context_len,
            device=self._device,
        )
        self._drafter: Drafter | None = None
        if draft is not None:
            self._drafter = Drafter(
                draft,
                self._pools,
                max_batch_size=max_batch_size,
                max_context_len=max_context_len,
            )
        self._ahead: Ahead | None = None
        self._drawn = Mark(self._device)  # when all tokens of the step have come
        self._prompts: PromptBuckets | None = None
        if use_graphs and self._device.type == "cuda":
            self._prompts = PromptBuckets(self._infer, self._pools, self._device)
            drafts = self._drafter.steps if self._drafter is not None else []
            capture_all([*self._decoder.steps, *self._prompts.steps, *drafts], self._device)
            warm_up(self._infer, self._pools, max_tokens_per_step, self._device)
        mib = spec.bytes_per_block * count / 2**20
        logger.info("%d KV blocks, %.1f MiB, on %s", count, mib, self._device)

    @classmethod
    def open(
        cls,
        engine: EngineDir,
        *,
        num_blocks: int | Callable[[int], int],
        max_batch_size: int = 16,
        max_context_len: int = 0,
        max_tokens_per_step: int = 256,
        device: str = "cuda",
        use_graphs: bool = True,
    ) -> CudaRunner:
        """Load a verified engine directory; `max_context_len` 0 means the engine's own.

        `device` "cpu" runs everything in plain PyTorch.

        Raises:
            EngineMismatchError: the engine is for another target or cannot be run by this version.
            ConfigError: the device is missing or too old, or its memory does not suffice.
        """
        manifest = engine.manifest
        if manifest.target != TARGET:
            raise EngineMismatchError(
                mismatch(engine.path, f"built for {manifest.target!r}, not for {TARGET!r}")
            )
        opened = open_device(device)
        model, draft = load_model(read_program(engine.model_path), opened, manifest.precision), None
        if manifest.draft_file is not None:
            program = read_program(engine.path / manifest.draft_file)
            draft = load_draft(program, model, manifest.precision)
        return cls(
            model,
            manifest.kv_cache,
            vocab_size=manifest.model.vocab_size,
            num_blocks=num_blocks,
            max_batch_size=max_batch_size,
            max_context_len=max_context_len or manifest.max_context_len,
            max_tokens_per_step=max_tokens_per_step,
            use_graphs=use_graphs,
            draft=draft,
        )

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

    def run(
        self, rows: tuple[StepRow, ...], following: tuple[FollowingRow, ...] = ()
    ) -> StepResult:
        """See WaitingRunner.run. With a draft model nothing is launched ahead."""
        if self._drafter is None:
            return self._run(rows, following)[0]
        units = tuple(unit for row in rows for unit in one_token_rows(row))
        found, parts = self._run(units)
        asked = [i for i, unit in enumerate(units) if unit.sampling is not None]
        ids, probs, tops = found.token_ids, found.log_probs, found.top_log_probs
        drawn = list(accept(rows, ids[asked].tolist(), probs[asked].tolist()))
        owners = [i for i, row in enumerate(rows) for _ in one_token_rows(row)]
        with torch.inference_mode():
            hidden = Hidden.join(rows, units, parts)
            guesses = self._drafter.guess(rows, [ids for ids, _ in drawn], hidden)
        return StepResult(
            np.array([ids[0] if ids else -1 for ids, _ in drawn], np.int32),
            np.array([probs[0] if probs else np.nan for _, probs in drawn], np.float32),
            tuple(
                Speculation(ids[1:], probs[1:], guesses.get(i, ()))
                for i, (ids, probs) in enumerate(drawn)
            ),
            by_row(rows, tuple(tops[i] for i in asked) if tops else ()),
            tuple(owners[i] for i in found.overflowed),
        )

    def _run(
        self, rows: Sequence[StepRow], following: Sequence[FollowingRow] = ()
    ) -> tuple[StepResult, list[tuple[list[int], Tensor]]]:
        """Return the result for rows without drafts, and hidden states if there are."""
        hidden: list[tuple[list[int], Tensor]] = []
        tops: dict[int, TopLogProbs] = {}
        under_way = None if self._ahead is None else self._ahead.take(rows)
        self._ahead = ahead = None
        parts = [] if under_way is None else [under_way]
        with torch.inference_mode():
            for indices, (logits, packed, *states) in self._compute(rows, under_way is None):
                own = [rows[i] for i in indices]
                parts.append(Drawn.fetch(indices, self._sample(own, logits, packed)))
                if not following:
                    self.meanwhile()
                tops.update(zip(indices, likeliest(logits, own), strict=False))
                hidden += [(indices, each.clone()) for each in states]
            self._drawn.set()
            if following:
                self._ahead = ahead = self._launch_ahead(following, parts)
                self.meanwhile()
        self._drawn.wait()
        result = self._result(rows, parts, tops)
        if ahead is not None:
            ahead.fed(result.token_ids)
        return result, hidden

    def _result(
        self, rows: Sequence[StepRow], parts: Sequence[Drawn], tops: Mapping[int, TopLogProbs]
    ) -> StepResult:
        """Put together what has arrived."""
        asked = np.array([row.sampling is not None for row in rows])
        scored = np.array(
            [row.sampling is not None and row.sampling.params.return_log_probs for row in rows]
        )
        token_ids = np.full(len(rows), -1, np.int32)
        log_probs = np.full(len(rows), np.nan, np.float32)
        for part in parts:
            ids, probs = unpack(part.packed)
            token_ids[part.rows], log_probs[part.rows] = ids[part.columns], probs[part.columns]
        overflowed = tuple(np.flatnonzero((token_ids < 0) & ~asked).tolist())
        token_ids[~asked] = -1
        log_probs = np.where(scored & (token_ids >= 0), np.minimum(log_probs, 0), np.float32("nan"))
        found = tuple(tops.get(i, ()) for i in range(len(rows))) if tops else ()
        return StepResult(token_ids, log_probs, (), found, overflowed)

    def _launch_ahead(self, following: Sequence[FollowingRow], parts: Sequence[Drawn]) -> Ahead:
        """Launch the decode step of rows whose tokens `parts` draw."""
        if self._decoder is None:
            raise RuntimeError("the runner is closed")
        rows = [each.row for each in following]
        future = FutureTokens.of(parts, [each.source for each in following])
        logits, packed, *_ = self._decoder.run(rows, future)
        return Ahead(following, self._sample(rows, logits, packed))

    def score(self, rows: tuple[StepRow, ...]) -> tuple[RowScores, ...]:
        """See ScoringRunner.score: all rows in one prefill, with the logits of every token.

        Takes memory for V logits a token.
        """
        if self._model is None:
            raise RuntimeError("the runner is closed")
        following = [np.append(row.token_ids[1:], row.next_token_id) for row in rows]
        with torch.inference_mode():
            wanted = torch.from_numpy(np.concatenate(following)).to(self._device)
            step = replace(packed_step(rows, self._pools, self._device), logit_rows=None)
            packed = score(self._model.forward(step)[0], wanted).cpu()
        best_ids, log_probs = unpack(packed)
        ends = np.cumsum([len(ids) for ids in following])[:-1]
        parts = zip(np.split(log_probs, ends), np.split(best_ids, ends), strict=True)
        return tuple(RowScores(*part) for part in parts)

    def forward(self, rows: Sequence[StepRow]) -> NDArray[np.float32]:
        """Run the model; return logits [n, V] of the last token of each row. Mutates the pools."""
        result = np.empty((len(rows), self._vocab_size), np.float32)
        with torch.inference_mode():
            for indices, (logits, *_) in self._compute(rows):
                result[indices] = logits.float().cpu().numpy()
        return result

    def close(self) -> None:
        """Free the model and the pools; idempotent."""
        self._model, self._decoder, self._prompts, self._pools = None, None, None, {}
        self._drafter, self._ahead = None, None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _compute(
        self, rows: Sequence[StepRow], with_decodes: bool = True
    ) -> Iterator[tuple[list[int], Outputs]]:
        """Yield parts of the step: row indices [n], logits [n, V], greedy choice [2, ≥ n].

        And hidden states [≥ T, D], where a draft model reads them.

        What a part holds must be read, in stream order, before the next part runs.
        """
        if self._decoder is None:
            raise RuntimeError("the runner is closed")
        decodes = [i for i, row in enumerate(rows) if len(row.token_ids) == 1]
        if decodes and with_decodes:
            yield decodes, self._decoder.run([rows[i] for i in decodes])
        prefills = [i for i, row in enumerate(rows) if len(row.token_ids) > 1]
        if prefills:
            others = [rows[i] for i in prefills]
            if self._prompts is not None and self._prompts.hold(others):
                yield prefills, self._prompts.run(others)
            else:
                self.meanwhile()
                yield prefills, self._infer(packed_step(others, self._pools, self._device))

    def _infer(self, step: Step) -> Outputs:
        """Return logits [R, V], the greedy choice of each row, and hidden states if there are.

        The choice is −1 for a row with any token that overflowed, its logits being asked for or
        not: in a decode step they are computed for every token, and show it.
        """
        if self._model is None:
            raise RuntimeError("the runner is closed")
        logits, norms, *hidden = self._model.forward(step)
        packed = greedy(logits)
        if isinstance(step.attention, Prefill):
            refuse_overflowed(packed, norms, step.attention.cu_q)
        return logits, packed, *hidden

    def _sample(self, rows: Sequence[StepRow], logits: Tensor, packed: Tensor) -> Tensor:
        """Return [2, ≥ n]: the greedy choice, or what the rows ask for where there is one."""
        samplings = [row.sampling for row in rows]
        if any(s is not None and asks_for_more(s) for s in samplings):
            wanted = [i for i, s in enumerate(samplings) if s is not None]
            at = sent(torch.tensor(wanted), logits.device)
            chosen = choose(logits.index_select(0, at), [s for s in samplings if s is not None])
            packed = packed[:, : len(rows)]
            drawn = packed.index_copy(1, at, chosen.to(packed.device))
            packed = torch.where(packed[0] < 0, packed, drawn)
        return packed
