"""ModelRunner on ONNX Runtime's CUDA provider.

    rows ──▶ model ──┬── likeliest tokens, log probs ──▶ every row is greedy
                     └── logits ──▶ sampler (host)       one asks for more

Unlike on the CPU, the last bits of a row's numbers may depend on the other rows: cuBLAS sums in an
order of its own for each shape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from deepseek_triton.build.engine_dir import EngineDir, load_engine_dir, mismatch
from deepseek_triton.build.targets import ONNXRUNTIME_GPU
from deepseek_triton.errors import EngineMismatchError
from deepseek_triton.kv_cache.spec import KVCacheSpec
from deepseek_triton.request import TopLogProbs
from deepseek_triton.runner.base import RowSampling, RowScores, StepResult, StepRow
from deepseek_triton.runner.ort_cuda import CUDA, allocate_pools, memory_named, open_session
from deepseek_triton.runner.ort_cuda_model import DeviceModel
from deepseek_triton.runner.ort_model import ModelRow
from deepseek_triton.runner.sampler import sample, score, top_log_probs

logger = logging.getLogger(__name__)


class OnnxRuntimeCudaRunner:
    """Runs an engine directory of "onnxruntime" built for the CUDA provider; a ScoringRunner."""

    def __init__(
        self,
        engine: EngineDir,
        *,
        num_blocks: int | Callable[[int], int],
        device: str = CUDA,
    ) -> None:
        """Load the model and allocate the pools.

        `num_blocks` may be a function of the bytes that are free once the model is loaded. `device`
        "cpu" runs the same model without a GPU, in fp32.

        Raises:
            EngineMismatchError: the engine is for another target, provider or release.
            ConfigError: the CUDA provider or a GPU is missing, or memory is short.
        """
        manifest = engine.manifest
        if (manifest.target, manifest.provider) != ("onnxruntime", CUDA):
            built = f"built for {manifest.target!r}, {manifest.provider or 'cpu'!r}"
            raise EngineMismatchError(mismatch(engine.path, f"{built}, not for PROVIDER=cuda"))
        if device == CUDA and _release(ort.__version__) != _release(ONNXRUNTIME_GPU):
            raise EngineMismatchError(
                f"{engine.path}: built for ONNX Runtime {ONNXRUNTIME_GPU} with CUDA, this is "
                f"{ort.__version__}: run `make setup-onnxruntime-gpu`, or build with PROVIDER=cpu"
            )
        self._spec, self._vocab_size = manifest.kv_cache, manifest.model.vocab_size
        session = open_session(engine.model_path, device)
        pools = allocate_pools(self._spec, num_blocks, device)
        self._num_blocks = int(next(iter(pools.values())).shape()[0]) - 1
        self._model = DeviceModel(
            session,
            self._spec,
            pools,
            device=device,
            num_heads=manifest.model.attention.num_heads,
            vocab_size=self._vocab_size,
        )
        logger.info(
            "loaded %s on %s: %d KV blocks, %.1f MiB",
            engine.path,
            device,
            self._num_blocks,
            self._spec.bytes_per_block * self._num_blocks / 2**20,
        )

    @classmethod
    def load(cls, path: Path, *, num_blocks: int, device: str = CUDA) -> OnnxRuntimeCudaRunner:
        """Verify the engine directory `path` and load it."""
        return cls(load_engine_dir(path), num_blocks=num_blocks, device=device)

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
        token_ids = np.full(len(rows), -1, np.int32)
        log_probs = np.full(len(rows), np.nan, np.float32)
        asking = [(i, row.sampling) for i, row in enumerate(rows) if row.sampling is not None]
        order = [index for index, _ in asking]
        samplings = [sampling for _, sampling in asking]
        tops: tuple[TopLogProbs, ...] = ()
        if all(s.plain and not s.params.top_log_probs for s in samplings):
            token_ids[order], log_probs[order], overflowed = self._best(rows)
        else:
            _, logits, overflowed = self._forward(rows)
            token_ids[order], log_probs[order] = sample(logits, samplings)
            tops = self._tops(len(rows), order, samplings, logits)
        return StepResult(token_ids, log_probs, top_log_probs=tops, overflowed=overflowed)

    def score(self, rows: tuple[StepRow, ...]) -> tuple[RowScores, ...]:
        """See ScoringRunner.score."""
        with memory_named(f"a step of {sum(len(row.token_ids) for row in rows)} tokens"):
            logits, places, _ = self._model.logits([_row(row, len(row.token_ids)) for row in rows])
        following = [[*row.token_ids[1:].tolist(), row.next_token_id] for row in rows]
        return tuple(
            RowScores(*score(logits[row_places], np.array(ids)))
            for row_places, ids in zip(places, following, strict=True)
        )

    def forward(self, rows: Sequence[StepRow]) -> tuple[list[int], NDArray[np.float32]]:
        """Run the model alone; return the indices of the sampling rows and their logits [n, V].

        Mutates the pools.
        """
        return self._forward(rows)[:2]

    def close(self) -> None:
        """Free the model and the pools; idempotent."""
        self._model.close()

    def _forward(
        self, rows: Sequence[StepRow]
    ) -> tuple[list[int], NDArray[np.float32], tuple[int, ...]]:
        """As `forward`, and the rows that overflowed."""
        with memory_named(f"a step of {sum(len(row.token_ids) for row in rows)} tokens"):
            logits, places, overflowed = self._model.logits([_row(row) for row in rows])
        order = [index for index, row_places in enumerate(places) if row_places]
        return order, logits[[places[index][-1] for index in order]], overflowed

    def _best(
        self, rows: Sequence[StepRow]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], tuple[int, ...]]:
        """Return the greedy token and its log probability of each sampling row, in their order.

        And the rows that overflowed. A row whose logits are not finite, or all 0, has no token: −1.
        All 0 shows in token 0 with the share of any other; its log probability is rounded.
        """
        with memory_named(f"a step of {sum(len(row.token_ids) for row in rows)} tokens"):
            ids, log_probs, places, overflowed = self._model.best([_row(row) for row in rows])
        order = [row_places[-1] for row_places in places if row_places]
        ids, log_probs = ids[order], log_probs[order]
        uniform = np.abs(log_probs + np.log(self._vocab_size)) < 1e-5
        none = ~np.isfinite(log_probs) | (ids == 0) & uniform
        asked = [row.sampling.params.return_log_probs for row in rows if row.sampling is not None]
        shown = np.array(asked, bool) & ~none
        log_probs = np.where(shown, log_probs, np.float32(np.nan))
        return np.where(none, -1, ids), log_probs, overflowed

    def _tops(
        self,
        count: int,
        order: Sequence[int],
        samplings: Sequence[RowSampling],
        logits: NDArray[np.float32],
    ) -> tuple[TopLogProbs, ...]:
        counts = [sampling.params.top_log_probs for sampling in samplings]
        found = dict(zip(order, top_log_probs(logits, counts), strict=False))
        return tuple(found.get(index, ()) for index in range(count)) if found else ()


def _row(row: StepRow, num_logits: int | None = None) -> ModelRow:
    wanted = int(row.sampling is not None) if num_logits is None else num_logits
    return ModelRow(row.token_ids, row.context_len, row.block_table, wanted)


def _release(text: str) -> list[str]:
    return text.split(".")[:2]
