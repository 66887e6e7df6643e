from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from deepseek_triton.build.engine_dir import EngineDir, load_engine_dir
from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.errors import ConfigError
from deepseek_triton.evaluate.truncation import truncate
from deepseek_triton.request import RequestKey, SamplingParams
from deepseek_triton.runner.base import RowSampling, StepRow
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner

NO_TOKENS = np.zeros(0, np.int32)
GREEDY = RowSampling(SamplingParams(), 0.0, None, NO_TOKENS, NO_TOKENS)
IDS = np.random.default_rng(0).integers(3, 4000, 40).astype(np.int32)
OTHER = np.concatenate([IDS[::-1][:30], IDS[30:]])  # the last ten tokens are the same


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    folder = tmp_path_factory.mktemp("truncation")
    write_random_checkpoint(folder / "checkpoint", preset_config("v2-lite"))
    build_engine(folder / "checkpoint", folder / "engine")
    return load_engine_dir(folder / "engine")


def logits(engine: EngineDir, ids: NDArray[np.int32]) -> NDArray[np.float32]:
    runner = OnnxRuntimeRunner(engine, num_blocks=4, num_threads=1)
    row = StepRow(RequestKey("r"), ids, 0, np.arange(3, dtype=np.int32), GREEDY)
    found = runner.forward([row])[1].copy()
    runner.close()
    return found


def lengths(engine: EngineDir, value: int) -> NDArray[np.int32]:
    model = engine.manifest.model
    return np.full((model.num_layers, model.attention.num_heads), value, np.int32)


def test_heads_that_keep_everything_change_nothing(engine: EngineDir, tmp_path: Path) -> None:
    whole = truncate(engine, tmp_path, lengths(engine, 40), sink=0)
    np.testing.assert_array_equal(logits(whole, IDS), logits(engine, IDS))


def test_a_token_sees_as_far_back_as_layers_and_lengths_allow(
    engine: EngineDir, tmp_path: Path
) -> None:
    short = truncate(engine, tmp_path, lengths(engine, 3), sink=0)
    assert engine.manifest.model.num_layers * 2 < 10
    np.testing.assert_allclose(logits(short, IDS), logits(short, OTHER), atol=1e-5)
    assert np.abs(logits(engine, IDS) - logits(engine, OTHER)).max() > 1e-3


def test_sinks_stay_in_sight(engine: EngineDir, tmp_path: Path) -> None:
    short = truncate(engine, tmp_path, lengths(engine, 3), sink=4)
    assert np.abs(logits(short, IDS) - logits(short, OTHER)).max() > 1e-3


def test_one_head_alone_is_cut(engine: EngineDir, tmp_path: Path) -> None:
    retained = lengths(engine, 40)
    retained[1, 2] = 1
    cut = truncate(engine, tmp_path, retained, sink=0)
    difference = np.abs(logits(cut, IDS) - logits(engine, IDS)).max()
    (tmp_path / "all").mkdir()
    every = truncate(engine, tmp_path / "all", lengths(engine, 1), sink=0)
    assert 0 < difference < np.abs(logits(every, IDS) - logits(engine, IDS)).max()


@pytest.mark.parametrize(("shape", "value"), [((4, 3), 5), ((4, 4), 0)])
def test_lengths_that_do_not_fit_are_refused(
    engine: EngineDir, tmp_path: Path, shape: tuple[int, int], value: int
) -> None:
    with pytest.raises(ConfigError, match="retained lengths must be at least 1"):
        truncate(engine, tmp_path, np.full(shape, value, np.int32), sink=0)
