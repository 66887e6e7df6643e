"""From the configuration to a running engine."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deepseek_triton.build.engine_dir import EngineDir, load_engine_dir
from deepseek_triton.build.manifest import Manifest
from deepseek_triton.config import EngineConfig, label
from deepseek_triton.engine.delivery import Deliveries
from deepseek_triton.engine.loop import EngineLoop
from deepseek_triton.errors import ConfigError, EngineMismatchError
from deepseek_triton.kv_cache.sizing import available_memory, num_blocks_for
from deepseek_triton.runner.base import ModelRunner
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
from deepseek_triton.runner.onnxruntime_cuda import OnnxRuntimeCudaRunner
from deepseek_triton.runner.ort_memory import memory_for_weights, require_memory
from deepseek_triton.runner.tensorrt import TensorRTRunner
from deepseek_triton.text.guide import GuideCompiler, Guides
from deepseek_triton.text.tokenizer import TOKENIZER_FILE

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineLimits:
    """What a request is checked against."""

    vocab_size: int
    max_context_len: int  # tokens, prompt and output together
    end_ids: tuple[int, ...]  # any of them ends a request that names no end id
    kv_cache_tokens: int | None = None  # most tokens of one request in the KV cache; None: enough
    guides: Guides | None = None


def context_limit(config: EngineConfig, manifest: Manifest) -> int:
    """Return the most tokens of prompt and output together; raises ConfigError."""
    built = manifest.max_context_len
    if config.max_context_len > built:
        raise ConfigError(
            f"{label('max_context_len')}: {config.max_context_len} is more than the engine's "
            f"{built} tokens"
        )
    return config.max_context_len or built


def open_engine(
    config: EngineConfig,
    *,
    deliver: Callable[[Deliveries], None] | None = None,
    on_death: Callable[[], object] | None = None,
) -> tuple[EngineLoop, EngineLimits]:
    """Load the engine directory and start its loop, in this process; see EngineLoop.

    Raises EngineMismatchError for a directory that cannot be served, ConfigError for settings that
    do not fit it.
    """
    engine_dir = load_engine_dir(Path(config.engine_dir))
    manifest = engine_dir.manifest
    guides = GuideCompiler(
        engine_dir.path / TOKENIZER_FILE, manifest.model.vocab_size, manifest.model.eos_token_ids
    )
    limits = EngineLimits(
        vocab_size=manifest.model.vocab_size,
        max_context_len=context_limit(config, manifest),
        end_ids=manifest.model.eos_token_ids,
        guides=guides,
    )
    runner = _load_runner(config, engine_dir, limits)
    guides.prepare()
    # The last token of a request is never written to the cache.
    kv_cache_tokens = runner.num_blocks * manifest.kv_cache.block_size + 1
    limits = dataclasses.replace(limits, kv_cache_tokens=kv_cache_tokens)
    _logger.info(
        "serving %s, built from %s in %s: %d KV blocks of %d tokens, context limit %d",
        engine_dir.path,
        manifest.checkpoint.name,
        manifest.precision,
        runner.num_blocks,
        manifest.kv_cache.block_size,
        limits.max_context_len,
    )
    loop = EngineLoop(
        runner,
        config.scheduler,
        max_context_len=limits.max_context_len,
        deliver=deliver,
        on_death=on_death,
    )
    return loop, limits


def _load_runner(config: EngineConfig, engine_dir: EngineDir, limits: EngineLimits) -> ModelRunner:
    manifest = engine_dir.manifest
    load = _RUNNERS.get(manifest.target)
    if load is None:
        raise EngineMismatchError(
            f"{engine_dir.path}: built for {manifest.target}; this server runs "
            + ", ".join(sorted(_RUNNERS))
        )
    return load(config, engine_dir, limits)


def _load_onnxruntime(
    config: EngineConfig, engine_dir: EngineDir, limits: EngineLimits
) -> ModelRunner:
    if engine_dir.manifest.provider == "cuda":
        size_pool = partial(_size_pool, config, engine_dir, limits)
        return OnnxRuntimeCudaRunner(engine_dir, num_blocks=size_pool)
    require_memory(engine_dir)
    left = max(0, available_memory() - memory_for_weights(engine_dir))
    num_blocks = _size_pool(config, engine_dir, limits, left)
    return OnnxRuntimeRunner(engine_dir, num_blocks=num_blocks, num_threads=config.num_threads)


def _load_cuda(config: EngineConfig, engine_dir: EngineDir, limits: EngineLimits) -> ModelRunner:
    try:
        from deepseek_triton.runner.cuda import CudaRunner
    except ImportError as error:
        raise ConfigError(
            f"{engine_dir.path}: built for cuda, which needs PyTorch ({error}); "
            "run .venv/bin/pip install -e '.[cuda]', or build with TARGET=onnxruntime"
        ) from error
    return CudaRunner.open(
        engine_dir,
        num_blocks=partial(_size_pool, config, engine_dir, limits),
        max_batch_size=config.scheduler.max_batch_size,
        max_context_len=limits.max_context_len,
        max_tokens_per_step=config.scheduler.max_tokens_per_step,
    )


def _load_tensorrt(
    config: EngineConfig, engine_dir: EngineDir, limits: EngineLimits
) -> ModelRunner:
    return TensorRTRunner(engine_dir, num_blocks=partial(_size_pool, config, engine_dir, limits))


def _size_pool(
    config: EngineConfig, engine_dir: EngineDir, limits: EngineLimits, available: int
) -> int:
    """Return the KV blocks for a pool in memory of which `available` bytes are free."""
    return num_blocks_for(
        config.cache,
        engine_dir.manifest.kv_cache,
        max_requests=config.scheduler.max_batch_size,
        max_context_len=limits.max_context_len,
        available=available,
    )


_RUNNERS: dict[str, Callable[[EngineConfig, EngineDir, EngineLimits], ModelRunner]] = {
    "onnxruntime": _load_onnxruntime,
    "cuda": _load_cuda,
    "tensorrt": _load_tensorrt,
    "tensorrt_rtx": _load_tensorrt,
}
