"""Build an engine from a checkpoint the first time it is served, and find it again later."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from deepseek_triton.build.pipeline import build_engine, is_current
from deepseek_triton.checkpoint.config import find_config
from deepseek_triton.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def cached_engine_path(checkpoint: Path) -> Path:
    """Return where the engine of `checkpoint` is kept: one place for each checkpoint folder.

    It is below XDG_CACHE_HOME (XDG base directory specification), by default ~/.cache.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    checkpoint = checkpoint.resolve()
    digest = hashlib.sha256(str(checkpoint).encode()).hexdigest()[:12]
    return Path(root) / "deepseek-triton" / "engines" / f"{checkpoint.name}-{digest}"


def ensure_engine(checkpoint: Path, engine_dir: Path, *, draft: bool = False) -> bool:
    """Build `engine_dir` from `checkpoint` unless it is that already; return whether it built.

    Raises:
        CheckpointError, TokenizerError, BuildError: the checkpoint, its tokenizer or the place of
            the engine is at fault.
    """
    find_config(checkpoint)
    if is_current(engine_dir, checkpoint, draft=draft):
        logger.info("engine %s is up to date", engine_dir)
        return False
    Tokenizer.load(checkpoint)  # before the long part: serving needs it
    logger.info("building engine %s from %s", engine_dir, checkpoint)
    build_engine(checkpoint, engine_dir, draft=draft)
    return True
