"""An engine built for ONNX Runtime, through its runner, against transformers' own classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.request import SamplingParams
from deepseek_triton.runner.base import RowSampling, StepRow
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
from tests.parity.cases import CASES, VOCAB_SIZE, Reference
from tests.parity.driver import check_parity, make_workload

pytestmark = pytest.mark.parity

WORKLOAD = make_workload(VOCAB_SIZE)
NO_TOKENS = np.zeros(0, np.int32)
GREEDY = RowSampling(SamplingParams(), 0.0, None, NO_TOKENS, NO_TOKENS)


class RunnerLogits:
    """Logits of every row of a step, also of those that ask for no token."""

    def __init__(self, runner: OnnxRuntimeRunner) -> None:
        self.runner = runner

    def __call__(self, rows: tuple[StepRow, ...]) -> NDArray[np.float32]:
        order, logits = self.runner.forward([replace(row, sampling=GREEDY) for row in rows])
        aligned = np.empty_like(logits)
        aligned[order] = logits
        return aligned


@pytest.fixture(scope="module", params=CASES)
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Reference, OnnxRuntimeRunner]]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    reference = CASES[request.param].save(folder / "checkpoint")
    (folder / "checkpoint" / "tokenizer.json").write_text("{}")  # never read here
    build_engine(folder / "checkpoint", folder / "engine", block_size=WORKLOAD.block_size)
    runner = OnnxRuntimeRunner.load(
        folder / "engine", num_blocks=WORKLOAD.num_blocks, num_threads=1
    )
    yield reference, runner
    runner.close()


def test_logits_equal_the_reference(built: tuple[Reference, OnnxRuntimeRunner]) -> None:
    reference, runner = built
    check_parity(reference, WORKLOAD, RunnerLogits(runner))
