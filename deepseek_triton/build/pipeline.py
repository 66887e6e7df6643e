"""Checkpoint to engine directory, in one go."""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path

import numpy as np

from deepseek_triton.build.engine_dir import create_engine_dir, describe_files, load_engine_dir
from deepseek_triton.build.graph_report import describe_portable, write_report
from deepseek_triton.build.limits import CallLimits
from deepseek_triton.build.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    CheckpointOrigin,
    Manifest,
)
from deepseek_triton.build.parallel import Parallel
from deepseek_triton.build.targets import Target, find_target
from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.names import draft_tensors, validate_checkpoint
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.errors import CheckpointError, ConfigError, EngineMismatchError
from deepseek_triton.export.functions import OPSET
from deepseek_triton.export.portable import DRAFT_FILE, export_portable
from deepseek_triton.export.precision import find_precision
from deepseek_triton.kv_cache.spec import KVCacheSpec
from deepseek_triton.quantize.checkpoint import open_checkpoint

logger = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def build_engine(
    checkpoint_dir: Path,
    engine_dir: Path,
    *,
    target: str = "onnxruntime",
    precision: str = "fp32",
    block_size: int | None = None,
    draft: bool = False,
    limits: CallLimits | None = None,
    timing_cache: Path | None = None,
    parallel: Parallel | None = None,
    int4_accuracy_level: int | None = None,
    provider: str | None = None,
) -> Manifest:
    """Build the engine directory `engine_dir` from a Hugging Face checkpoint; return its manifest.

    `draft` adds the checkpoint's multi-token-prediction layer, for speculative decoding. `limits`
    and `timing_cache` (a file that is read, if there, and written) are for targets that compile,
    `parallel` for tensorrt_llm, `int4_accuracy_level` (4 or 0) and `provider` (cpu or cuda) for
    onnxruntime. Memory stays near the largest tensor; an engine that exists is replaced at the end.

    Raises CheckpointError for a checkpoint that cannot be read or is not supported, ConfigError for
    an option that is unknown or not for this target, BuildError if `engine_dir` cannot be written.
    """
    builder = find_target(target, precision, provider)
    block_size = _check_options(builder, target, block_size, draft, parallel)
    spec, reader = _open_checkpoint(Path(checkpoint_dir), draft)
    limits = _limits(target, builder, spec, limits, timing_cache)
    level = _int4_accuracy_level(builder, target, reader, int4_accuracy_level)
    with create_engine_dir(engine_dir) as folder:
        if builder.write is not None:
            sizes = {"limits": limits, "parallel": parallel or Parallel()}
            model_path = builder.write(spec, reader, checkpoint_dir, folder, precision, **sizes)
        else:
            model_path = export_portable(
                spec, reader, folder, precision=precision, block_size=block_size, draft=draft
            )
            model_path = _rewrite(builder, model_path, limits, timing_cache, level)
        tokenizer_files = _copy_tokenizer(checkpoint_dir, folder)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            target=target,
            precision=precision,
            model=spec,
            kv_cache=kv_cache_spec(spec, builder.kv_precision or precision, block_size, draft),
            max_context_len=limits.max_context_len if limits else spec.max_position_embeddings,
            opset=OPSET,
            versions=builder.versions(),
            checkpoint=describe_checkpoint(checkpoint_dir),
            model_file=model_path.name,
            draft_file=DRAFT_FILE if draft else None,
            tokenizer_files=tokenizer_files,
            files=describe_files(folder),
            limits=limits,
            int4_accuracy_level=level,
            provider=builder.provider,
        )
        (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    logger.info("built %s for %s, %s", engine_dir, target, precision)
    return manifest


def is_current(
    engine_dir: Path,
    checkpoint_dir: Path,
    *,
    target: str = "onnxruntime",
    precision: str = "fp32",
    block_size: int | None = None,
    draft: bool = False,
    limits: CallLimits | None = None,
    provider: str | None = None,
) -> bool:
    """Whether `engine_dir` is what build_engine would make again with these arguments.

    Contents of the engine's files are not verified (load_engine_dir does that).
    """
    builder = find_target(target, precision, provider)
    try:
        manifest = load_engine_dir(engine_dir, target=target, verify_contents=False).manifest
    except EngineMismatchError:
        return False
    return (
        manifest.precision == precision
        and manifest.kv_cache.block_size == (block_size or builder.block_size)
        and (manifest.draft_file is not None) == draft
        and (manifest.provider or find_target(target, precision).provider) == builder.provider
        and manifest.limits == _limits(target, builder, manifest.model, limits, None)
        and manifest.int4_accuracy_level in (None, *builder.int4_accuracy_levels[:1])
        and manifest.versions == builder.versions()
        and manifest.checkpoint == describe_checkpoint(checkpoint_dir)
    )


def describe_checkpoint(checkpoint_dir: Path) -> CheckpointOrigin:
    """Return name and fingerprint of a checkpoint folder, without reading its weights."""
    folder = Path(checkpoint_dir).resolve()
    digest = hashlib.sha256()
    try:
        for path in sorted(folder.glob("*.safetensors")):
            stat = path.stat()
            digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        for name in ("config.json", *TOKENIZER_FILES):
            if (folder / name).is_file():
                digest.update((folder / name).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    return CheckpointOrigin(folder.name, digest.hexdigest())


def _check_options(
    target: Target, name: str, block_size: int | None, draft: bool, parallel: Parallel | None
) -> int:
    """Return the block size to use; raise ConfigError for what the target cannot do."""
    block_size = target.block_size if block_size is None else block_size
    if not 1 <= block_size <= 1024:
        raise ConfigError(f"block_size: {block_size} is not in 1 ... 1024")
    if draft and not target.drafts:
        raise ConfigError(f"DRAFT: {_label(target, name)} cannot use a draft model; leave it out")
    if parallel not in (None, Parallel()) and target.write is None:
        raise ConfigError(f"TP, PP, EP: {name} runs on one device; leave them out")
    return block_size


def _label(target: Target, name: str) -> str:
    return f"{name} with PROVIDER=cuda" if target.provider == "cuda" else name


def _open_checkpoint(folder: Path, draft: bool) -> tuple[ModelSpec, CheckpointReader]:
    """Return what is in a checkpoint folder, after checking that nothing is missing."""
    spec = read_model_spec(folder)
    if draft and spec.architecture != "deepseek_v3":
        raise ConfigError(
            f"DRAFT: a {spec.architecture} model has no multi-token-prediction layer; leave it out"
        )
    reader = open_checkpoint(folder, spec)
    if draft and not any(name in reader for name, _ in draft_tensors(spec)):
        raise ConfigError(
            f"DRAFT: {folder} has no multi-token-prediction layer, which would be its layer "
            f"{spec.num_layers}; leave it out"
        )
    validate_checkpoint(reader, spec, draft=draft)
    if not (folder / TOKENIZER_FILES[0]).is_file():
        raise CheckpointError(
            f"{folder / TOKENIZER_FILES[0]}: not found; an engine cannot be served without"
        )
    return spec, reader


def _rewrite(
    target: Target,
    model_path: Path,
    limits: CallLimits | None,
    timing_cache: Path | None,
    int4_accuracy_level: int | None,
) -> Path:
    """Turn the portable model into the target's, in its folder; return the file to load."""
    portable = describe_portable(model_path)
    if int4_accuracy_level is None:
        target.build(model_path)
    else:
        target.build(model_path, int4_accuracy_level)
    write_report(model_path.parent, portable, model_path)
    if target.compile is None or limits is None:
        return model_path
    return target.compile(model_path, limits, timing_cache)


def _limits(
    name: str,
    target: Target,
    spec: ModelSpec,
    limits: CallLimits | None,
    timing_cache: Path | None,
) -> CallLimits | None:
    """Return the limits to compile for; None for a target that does not compile."""
    if target.has_limits:
        return (limits or CallLimits()).resolved(spec.max_position_embeddings)
    if limits not in (None, CallLimits()) or timing_cache is not None:
        raise ConfigError(
            f"{name} engines have no fixed sizes: leave out MAX_BATCH, MAX_PREFILL, MAX_CHUNK, "
            "MAX_CONTEXT, SM and TIMING_CACHE"
        )
    return None


def _int4_accuracy_level(
    target: Target, name: str, reader: CheckpointReader, level: int | None
) -> int | None:
    """Return the accuracy level of INT4 kernels; None if nothing asks for one."""
    levels = target.int4_accuracy_levels
    if level is not None and level not in levels:
        choice = f"choose {' or '.join(map(str, levels))}" if levels else "leave it out"
        raise ConfigError(f"INT4_ACCURACY: {_label(target, name)} has no level {level}; {choice}")
    if not levels or reader.int4_group_size() is None:
        return None
    return levels[0] if level is None else level


def kv_cache_spec(spec: ModelSpec, precision: str, block_size: int, draft: bool) -> KVCacheSpec:
    """Return the geometry of the KV pools that a model of `spec` needs, with a draft or not."""
    dtype = np.dtype(find_precision(precision).dtype)
    return KVCacheSpec(
        num_layers=spec.num_layers + draft,
        width=spec.attention.pool_width,
        block_size=block_size,
        dtype=dtype.name,
        itemsize=dtype.itemsize,
        pools=spec.attention.pools,
    )


def _copy_tokenizer(checkpoint_dir: Path, folder: Path) -> tuple[str, ...]:
    names = tuple(name for name in TOKENIZER_FILES if (checkpoint_dir / name).is_file())
    for name in names:
        shutil.copyfile(checkpoint_dir / name, folder / name)
    return names
