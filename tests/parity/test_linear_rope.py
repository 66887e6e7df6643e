"""DeepSeek-Coder's linear rope scaling: a factor of 4 that must neither be dropped nor drift."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
from deepseek_triton.runner.ort_model import ModelRow
from tests.parity.cases import VOCAB_SIZE, ParityCase, Reference
from tests.parity.driver import TOLERANCE

pytestmark = pytest.mark.parity

THETA, FACTOR, HEAD_DIM = 100000.0, 4.0, 10
SHAPE = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 16384,
}
CHUNK = 1024


def coder(folder: Path, rope: dict[str, object]) -> Reference:
    reference = ParityCase("coder", "llama", {**SHAPE, "rope_parameters": rope}).save(folder)
    (folder / "tokenizer.json").write_text("{}")  # never read here
    return reference


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reference, Path]:
    folder = tmp_path_factory.mktemp("coder")
    rope = {"rope_type": "linear", "factor": FACTOR, "rope_theta": THETA}
    reference = coder(folder / "checkpoint", rope)
    build_engine(folder / "checkpoint", folder / "engine")
    return reference, folder / "engine"


def test_the_factor_is_in_the_model(built: tuple[Reference, Path]) -> None:
    graph = onnx.load(built[1] / "model.onnx", load_external_data=False).graph
    tensor = next(t for t in graph.initializer if t.name == "rotary.inv_freq")
    plain = THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    np.testing.assert_allclose(numpy_helper.to_array(tensor), np.tile(plain / 4, 2), rtol=1e-6)


@pytest.mark.parametrize("length", [30, 5000])
def test_short_and_long_prompts_equal_the_reference(
    built: tuple[Reference, Path], tmp_path: Path, length: int
) -> None:
    reference, engine = built
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, length).astype(np.int32)
    table = np.random.default_rng(1).permutation(-(-length // 16)).astype(np.int32)
    runner = OnnxRuntimeRunner.load(engine, num_blocks=len(table), num_threads=1)
    want, _ = reference.run(ids)
    for begin in range(0, length, CHUNK):
        chunk = ids[begin : begin + CHUNK]
        row = ModelRow(chunk, begin, table, len(chunk))
        given = runner._models[0].forward([row])
        error = np.abs(given.logits[given.places[0]] - want[begin : begin + CHUNK]).max()
        assert error < TOLERANCE, f"off by {error:.1e} in the chunk from {begin}"
    runner.close()
    unscaled = coder(tmp_path / "unscaled", {"rope_type": "default", "rope_theta": THETA})
    assert np.abs(unscaled.run(ids)[0] - want).max() > 100 * TOLERANCE, "the factor matters here"
