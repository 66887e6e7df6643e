"""Build an engine from a checkpoint the first time it is served, and find it again later."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

from deepseek_triton.build.engine_dir import load_engine_dir
from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.errors import EngineMismatchError

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "DEEPSEEK_TRITON_CACHE"


def cached_engine_path(checkpoint: Path) -> Path:
    """Return where the engine of `checkpoint` is kept: one place per checkpoint folder."""
    root = os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "deepseek-triton"
    checkpoint = checkpoint.resolve()
    digest = hashlib.sha256(str(checkpoint).encode()).hexdigest()[:12]
    return Path(root) / "engines" / f"{checkpoint.name}-{digest}"


def ensure_engine(checkpoint: Path, engine_dir: Path) -> bool:
    """Build `engine_dir` from `checkpoint` unless it holds that engine; return whether it built.

    A checkpoint whose files changed in name, size or time, or an engine of another version of
    this package, is built anew.

    Raises:
        CheckpointError, BuildError: the checkpoint or the place of the engine is at fault.
    """
    stamp_path = engine_dir.with_name(f"{engine_dir.name}.source.json")
    stamp = _checkpoint_stamp(checkpoint)
    if _read(stamp_path) == stamp and _loads(engine_dir):
        logger.info("engine %s is up to date", engine_dir)
        return False
    engine_dir.parent.mkdir(parents=True, exist_ok=True)
    stamp_path.unlink(missing_ok=True)
    build_engine(checkpoint, engine_dir)
    stamp_path.write_text(stamp, encoding="utf-8")
    return True


def _loads(engine_dir: Path) -> bool:
    try:
        load_engine_dir(engine_dir, verify_contents=False)  # the server verifies them anyway
    except EngineMismatchError as error:
        logger.info("%s", error)
        return False
    return True


def _checkpoint_stamp(checkpoint: Path) -> str:
    files = sorted(p for p in checkpoint.glob("*") if p.is_file())
    stats = {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in files}
    return json.dumps({"checkpoint": str(checkpoint.resolve()), "files": stats}, indent=1)


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
