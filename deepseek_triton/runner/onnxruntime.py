"""ModelRunner on ONNX Runtime's CPU kernels, with speculative decoding where a draft is built in.

    rows ──▶ model ──logits──▶ sampler ──▶ tokens ──▶ draft model ──▶ guesses for the next step
               └──────────── hidden states ────────────┘

A row's drafts run in the same call as its last known token. A token is drawn from each position's
logits as it would be without drafts; a draft is right if that very token was drawn, and then the
next position's token holds as well. So the tokens of a request are the same with and without drafts
(the numbers too: see ort_model.py), for greedy and for random sampling. This is the acceptance of
speculative decoding (arXiv 2211.17192) for a draft that is certain of its token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from deepseek_triton.build.engine_dir import EngineDir, load_engine_dir, mismatch
from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.config import label
from deepseek_triton.errors import ConfigError, EngineMismatchError
from deepseek_triton.kv_cache.spec import KVCacheSpec
from deepseek_triton.request import TopLogProbs
from deepseek_triton.runner.acceptance import accept, by_row, following
from deepseek_triton.runner.base import RowScores, Speculation, StepResult, StepRow
from deepseek_triton.runner.ort_memory import require_memory
from deepseek_triton.runner.ort_model import ModelRow, ModelShape, PagedModel
from deepseek_triton.runner.ort_session import allocate_pools, available_cores, open_session
from deepseek_triton.runner.ort_shapes import AttentionShape
from deepseek_triton.runner.sampler import sample, score, top_log_probs

logger = logging.getLogger(__name__)

TARGET = "onnxruntime"


class OnnxRuntimeRunner:
    """Runs an engine directory built for the target "onnxruntime"; implements ModelRunner."""

    def __init__(self, engine: EngineDir, *, num_blocks: int, num_threads: int = 0) -> None:
        """Load the model and allocate the pools.

        `num_threads` 0 means the cores that this process may use.

        Raises:
            EngineMismatchError: the engine is for another target or ONNX Runtime version, or its
                weights take more memory than there is.
            ConfigError: `num_blocks` or `num_threads` is out of range or memory is short.
        """
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, not {num_blocks}")
        if num_threads < 0:
            raise ConfigError(f"{label('num_threads')} must be at least 0, not {num_threads}")
        manifest = engine.manifest
        _check_runtime(engine)
        require_memory(engine)
        num_threads = num_threads or available_cores()
        model = manifest.model
        shape = _shape(model)
        self._vocab_size = model.vocab_size
        self._spec = manifest.kv_cache
        self._num_blocks = num_blocks
        paths = [engine.model_path]
        if manifest.draft_file is not None:
            paths.append(engine.path / manifest.draft_file)
        sessions = [open_session(path, num_threads) for path in paths]
        pools = allocate_pools(self._spec, num_blocks)
        self._models = []
        for session in sessions:
            names = {value.name for value in session.get_inputs()}
            own = {name: pool for name, pool in pools.items() if name in names}
            self._models.append(
                PagedModel(session, shape, self._spec, own, num_threads=num_threads)
            )
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
        given = self._models[0].forward([_model_row(row) for row in rows])
        token_ids = np.full(len(rows), -1, np.int32)
        log_probs = np.full(len(rows), np.nan, np.float32)
        samplings = [
            sampling
            for row in rows
            if row.sampling is not None
            for sampling in (row.sampling, *row.draft_sampling)
        ]
        drawn: list[tuple[tuple[int, ...], tuple[float, ...]]] = [((), ())] * len(rows)
        tops: tuple[TopLogProbs, ...] = ()
        if samplings:
            logits = given.logits[[place for places in given.places for place in places]]
            ids, probs = sample(logits, samplings)
            drawn = list(accept(rows, ids.tolist(), probs.tolist()))
            counts = [sampling.params.top_log_probs for sampling in samplings]
            tops = by_row(rows, top_log_probs(logits, counts))
        for index, (row_ids, row_probs) in enumerate(drawn):
            if row_ids:
                token_ids[index], log_probs[index] = row_ids[0], row_probs[0]
        if len(self._models) == 1:
            return StepResult(token_ids, log_probs, (), tops, given.overflowed)
        guesses = self._draft(rows, [row_ids for row_ids, _ in drawn], given.hidden)
        speculation = tuple(
            Speculation(row_ids[1:], row_probs[1:], guesses.get(index, ()))
            for index, (row_ids, row_probs) in enumerate(drawn)
        )
        return StepResult(token_ids, log_probs, speculation, tops, given.overflowed)

    def score(self, rows: tuple[StepRow, ...]) -> tuple[RowScores, ...]:
        """See ScoringRunner.score."""
        inputs = [
            ModelRow(row.token_ids, row.context_len, row.block_table, len(row.token_ids))
            for row in rows
        ]
        given = self._models[0].forward(inputs)
        following = [[*row.token_ids[1:].tolist(), row.next_token_id] for row in rows]
        return tuple(
            RowScores(*score(given.logits[row_places], np.array(ids)))
            for row_places, ids in zip(given.places, following, strict=True)
        )

    def forward(self, rows: Sequence[StepRow]) -> tuple[list[int], NDArray[np.float32]]:
        """Run the model alone; return the indices of the sampling rows and their logits [n, V].

        The logits are a view that the next call overwrites. Mutates the pools.
        """
        given = self._models[0].forward([_model_row(row) for row in rows])
        order = [index for index, row_places in enumerate(given.places) if row_places]
        return order, given.logits[[given.places[index][-1] for index in order]]

    def close(self) -> None:
        """Free the model and the pools; idempotent."""
        for model in self._models:
            model.close()

    def _draft(
        self,
        rows: Sequence[StepRow],
        drawn: Sequence[tuple[int, ...]],
        hidden: Sequence[NDArray[np.float32]],
    ) -> dict[int, tuple[int, ...]]:
        """Guess the token after the last one drawn in each row; mutates the draft's pool.

        The draft model reads a row's hidden states beside the tokens that follow them, so it runs
        over prompts too, and stops before a token that could not be drawn.
        """
        indices, inputs = [], []
        for index, (row, token_ids) in enumerate(zip(rows, drawn, strict=True)):
            ids = following(row, token_ids)
            if ids is None:
                continue
            states = hidden[index][: len(ids)]
            wanted = int(row.sampling is not None)
            inputs.append(ModelRow(ids, row.context_len, row.block_table, wanted, states))
            indices.append(index)
        if not inputs:
            return {}
        given = self._models[1].forward(inputs)
        best = given.logits.argmax(axis=1).tolist()
        return {
            index: (best[row_places[0]],)
            for index, row_places in zip(indices, given.places, strict=True)
            if row_places
        }


def _shape(model: ModelSpec) -> ModelShape:
    attention = model.attention
    groups = attention.num_kv_heads
    products = AttentionShape(attention.num_heads, groups, attention.pool_width // groups)
    return ModelShape(model.vocab_size, model.hidden_size, products)


def _model_row(row: StepRow) -> ModelRow:
    ids = row.token_ids
    if row.draft_token_ids:
        ids = np.concatenate([ids, np.array(row.draft_token_ids, np.int32)])
    wanted = 0 if row.sampling is None else 1 + len(row.draft_token_ids)
    return ModelRow(ids, row.context_len, row.block_table, wanted)


def _check_runtime(engine: EngineDir) -> None:
    manifest = engine.manifest
    if manifest.target != TARGET:
        raise EngineMismatchError(
            mismatch(engine.path, f"built for {manifest.target!r}, not for {TARGET!r}")
        )
    if manifest.provider == "cuda":
        raise EngineMismatchError(
            mismatch(engine.path, "built for PROVIDER=cuda, not for the CPU provider")
        )
    built, running = manifest.versions.get("onnxruntime", "none"), ort.__version__
    if built.split(".")[:2] != running.split(".")[:2]:
        raise EngineMismatchError(
            mismatch(engine.path, f"built for ONNX Runtime {built}, this is {running}")
        )
