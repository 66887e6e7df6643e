from __future__ import annotations

from pathlib import Path

import numpy as np

from deepseek_triton.build.engine_dir import load_engine_dir
from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.evaluate.perplexity import score_windows
from deepseek_triton.evaluate.stepping import SteppingScorer
from deepseek_triton.runner.cuda import CudaRunner
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner

WINDOWS = np.random.default_rng(0).integers(3, 4000, (2, 25)).astype(np.int32)


def test_scores_step_by_step_are_those_of_whole_windows(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "checkpoint", preset_config("v3"))
    build_engine(tmp_path / "checkpoint", tmp_path / "engine")
    runner = OnnxRuntimeRunner(load_engine_dir(tmp_path / "engine"), num_blocks=4)
    expected = score_windows(runner, WINDOWS)
    found = score_windows(SteppingScorer(runner), WINDOWS)
    runner.close()
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-5)
    np.testing.assert_array_equal(found.best_ids, expected.best_ids)

    build_engine(tmp_path / "checkpoint", tmp_path / "cuda", target="cuda")
    other = CudaRunner.open(load_engine_dir(tmp_path / "cuda"), num_blocks=4, device="cpu")
    for scorer in (other, SteppingScorer(other)):
        found = score_windows(scorer, WINDOWS)
        np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-4)
        np.testing.assert_array_equal(found.best_ids, expected.best_ids)
    other.close()
