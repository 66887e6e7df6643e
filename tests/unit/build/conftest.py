"""A small engine directory for tests that need no model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deepseek_triton.build.engine_dir import describe_files
from deepseek_triton.build.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    CheckpointOrigin,
    Manifest,
)
from deepseek_triton.checkpoint.spec import (
    LatentAttentionSpec,
    ModelSpec,
    RopeSpec,
    YarnSpec,
)
from deepseek_triton.kv_cache.spec import KVCacheSpec

MODEL = ModelSpec(
    architecture="deepseek_v2",
    vocab_size=32,
    hidden_size=16,
    num_layers=2,
    intermediate_size=32,
    moe_layers=(),
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    attention=LatentAttentionSpec(2, None, 8, 4, 4, 4, 0.35),
    rope=RopeSpec(4, 10000.0, True, YarnSpec(4.0, 16)),
    moe=None,
    bos_token_id=0,
    eos_token_ids=(1,),
)


@pytest.fixture
def write_engine() -> Callable[[Path], Manifest]:
    """Return a function that fills a folder with two files and their manifest."""
    return _write_engine


def _write_engine(folder: Path) -> Manifest:
    (folder / "model.onnx").write_bytes(b"model")
    (folder / "weights.bin").write_bytes(bytes(range(256)))
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        target="onnxruntime",
        precision="fp32",
        model=MODEL,
        kv_cache=KVCacheSpec(num_layers=2, width=12, block_size=16),
        max_context_len=64,
        opset=21,
        versions={"onnxruntime": "1.2.3"},
        checkpoint=CheckpointOrigin("tiny", "00"),
        model_file="model.onnx",
        draft_file=None,
        tokenizer_files=(),
        files=describe_files(folder),
    )
    (folder / MANIFEST_NAME).write_text(manifest.to_json())
    return manifest
