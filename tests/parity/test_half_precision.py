"""Half-precision engines against transformers' classes in the same type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
from deepseek_triton.runner.ort_model import ModelRow
from tests.parity.cases import CASES

pytestmark = pytest.mark.parity
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("name", ["v2", "v3_all_dense", "qwen2"])
@pytest.mark.parametrize("precision", DTYPES)
def test_logits_are_within_the_rounding_of_transformers(
    tmp_path: Path, name: str, precision: str
) -> None:
    """The engine computes in float32, so it must be no further from transformers in half precision
    than transformers in float32 is, with the same weights; and next to that one itself."""
    dtype = DTYPES[precision]
    reference = replace(CASES[name], dtype=dtype).save(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "tokenizer.json").write_text("{}")  # never read here
    build_engine(tmp_path / "checkpoint", tmp_path / "engine", precision=precision)
    ids = np.random.default_rng(0).integers(0, 131, 40).astype(np.int32)
    wide, _ = reference.run(ids)
    reference.model.to(dtype)
    with torch.no_grad():
        inputs = torch.from_numpy(ids.astype(np.int64))[None]
        narrow = reference.model(inputs, use_cache=False).logits[0].float().numpy()
    runner = OnnxRuntimeRunner.load(tmp_path / "engine", num_blocks=4, num_threads=1)
    row = ModelRow(ids, 0, np.arange(3, dtype=np.int32), len(ids))
    given = runner._models[0].forward([row])
    ours = given.logits[given.places[0]]
    rounding = np.abs(wide - narrow).max()
    assert 1e-4 < rounding < 1.0
    assert np.abs(ours - wide).max() < 1e-4
    assert np.abs(ours - narrow).max() < 1.01 * rounding + 1e-4
    runner.close()
