"""An engine built for ONNX Runtime's CUDA provider against transformers' own classes.

It runs on the CPU provider, which has every kernel of the graph in fp32 and binds the same buffers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.request import SamplingParams
from deepseek_triton.runner.base import RowSampling, StepRow
from deepseek_triton.runner.onnxruntime_cuda import OnnxRuntimeCudaRunner
from tests.parity.cases import CASES, VOCAB_SIZE
from tests.parity.driver import check_parity, make_workload

pytestmark = pytest.mark.parity

WORKLOAD = make_workload(VOCAB_SIZE)
NO_TOKENS = np.zeros(0, np.int32)
GREEDY = RowSampling(SamplingParams(), 0.0, None, NO_TOKENS, NO_TOKENS)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_reference(case: str, tmp_path: Path) -> None:
    reference = CASES[case].save(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "tokenizer.json").write_text("{}")  # never read here
    engine, size = tmp_path / "engine", WORKLOAD.block_size
    build_engine(tmp_path / "checkpoint", engine, block_size=size, provider="cuda")
    runner = OnnxRuntimeCudaRunner.load(engine, num_blocks=WORKLOAD.num_blocks, device="cpu")

    def forward(rows: tuple[StepRow, ...]) -> NDArray[np.float32]:
        order, logits = runner.forward([replace(row, sampling=GREEDY) for row in rows])
        assert order == list(range(len(rows)))
        return logits

    check_parity(reference, WORKLOAD, forward)
    runner.close()
