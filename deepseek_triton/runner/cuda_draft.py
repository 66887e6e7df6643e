"""The multi-token-prediction layer on the device: guesses of the token after the last one drawn.

A row of one token with drafts becomes rows of one token each, which share its blocks: all write
their KV before any attends, so a decode graph runs them. The draft model runs in the same way, for
every token whose follower is known, with the model's hidden states there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deepseek_triton.runner.acceptance import following
from deepseek_triton.runner.base import StepRow
from deepseek_triton.runner.cuda_batch import Ints
from deepseek_triton.runner.cuda_graphs import DecodeBuckets, FixedStep, Outputs
from deepseek_triton.runner.cuda_model import CudaModel
from deepseek_triton.runner.cuda_sampling import greedy
from deepseek_triton.runner.cuda_step import Step, packed_step

MAX_TOKENS = 2  # of a decoding row: the last one drawn, and one guess


def one_token_rows(row: StepRow) -> Iterator[StepRow]:
    """Yield a row without drafts, and after it one for each draft."""
    if not row.draft_token_ids:
        yield row
        return
    yield replace(row, draft_token_ids=(), draft_sampling=())
    pairs = zip(row.draft_token_ids, row.draft_sampling, strict=True)
    for place, (token_id, sampling) in enumerate(pairs, row.context_len + len(row.token_ids)):
        ids = np.array([token_id], np.int32)
        yield StepRow(row.request_key, ids, place, row.block_table, sampling)


@dataclass(frozen=True)
class Hidden:
    """The model's hidden states in a step."""

    states: Tensor  # [N, D]
    first: tuple[int, ...]  # of each row's tokens; its drafts' states follow in `states`

    @classmethod
    def join(
        cls, rows: Sequence[StepRow], units: Sequence[StepRow], parts: Sequence[_Part]
    ) -> Hidden:
        """Put together what the parts of a step gave, whose rows are `units` of `rows`."""
        begins, base = [0] * len(units), 0
        for indices, states in parts:
            at = base
            for index in indices:
                begins[index] = at
                at += len(units[index].token_ids)
            base += len(states)
        sizes = [1 + len(row.draft_token_ids) for row in rows]
        first = tuple(begins[i] for i in (np.cumsum(sizes) - sizes).tolist())
        return cls(torch.cat([states for _, states in parts]), first)


_Part = tuple[list[int], Tensor]


class Drafter:
    """Runs a draft model beside the model."""

    def __init__(
        self,
        model: CudaModel,
        pools: dict[str, Tensor],
        *,
        max_batch_size: int,
        max_context_len: int,
    ) -> None:
        self._model, self._pools = model, pools
        size, table = max_batch_size * MAX_TOKENS, model.weights["embedding.weight"]
        self._states = torch.zeros((size, table.shape[1]), dtype=table.dtype, device=model.device)
        self._decoder = DecodeBuckets(
            self._infer,
            pools,
            max_batch=size,
            max_context_len=max_context_len,
            device=model.device,
            hidden=self._states,
        )

    @property
    def steps(self) -> list[FixedStep]:
        """To be captured."""
        return self._decoder.steps

    def guess(
        self, rows: Sequence[StepRow], drawn: Sequence[tuple[int, ...]], hidden: Hidden
    ) -> dict[int, tuple[int, ...]]:
        """Guess the token after the last one drawn, by row; mutates the draft's pool.

        `drawn` is what runner/acceptance.py yields. Prompts run as well, for their KV.
        """
        guesses: dict[int, tuple[int, ...]] = {}
        known = [following(row, ids) for row, ids in zip(rows, drawn, strict=True)]
        ready = [i for i, ids in enumerate(known) if ids is not None]
        decodes = [i for i in ready if len(rows[i].token_ids) == 1]
        prefills = [i for i in ready if len(rows[i].token_ids) > 1]
        for indices, run in ((decodes, self._run_decodes), (prefills, self._run_prefills)):
            if indices:
                follow = [ids for i in indices if (ids := known[i]) is not None]
                own = [rows[i] for i in indices]
                source = [
                    hidden.first[i] + np.arange(len(ids))
                    for i, ids in zip(indices, follow, strict=True)
                ]
                at = torch.from_numpy(np.concatenate(source)).to(self._model.device)
                best = run(own, follow, hidden.states.index_select(0, at))
                guesses |= {
                    i: (token_id,)
                    for i, token_id in zip(indices, best.tolist(), strict=True)
                    if token_id >= 0 and rows[i].sampling is not None
                }
        return guesses

    def _run_decodes(
        self, rows: Sequence[StepRow], known: Sequence[Ints], states: Tensor
    ) -> Tensor:
        units = [
            StepRow(row.request_key, ids[j : j + 1], row.context_len + j, row.block_table, None)
            for row, ids in zip(rows, known, strict=True)
            for j in range(len(ids))
        ]
        self._states[: len(units)] = states
        _, packed = self._decoder.run(units)
        return packed[0].cpu()[np.cumsum([len(ids) for ids in known]) - 1]

    def _run_prefills(
        self, rows: Sequence[StepRow], known: Sequence[Ints], states: Tensor
    ) -> Tensor:
        shifted = [replace(row, token_ids=ids) for row, ids in zip(rows, known, strict=True)]
        step = replace(packed_step(shifted, self._pools, self._model.device), hidden=states)
        _, packed = self._infer(step)
        return packed[0].cpu()

    def _infer(self, step: Step) -> Outputs:
        (logits,) = self._model.forward(step)
        return logits, greedy(logits)
