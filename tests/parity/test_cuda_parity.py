"""An engine built for the cuda target, through its runner on the CPU, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepseek_triton.build.engine_dir import load_engine_dir
from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.runner.cuda import CudaRunner
from tests.parity.cases import CASES, VOCAB_SIZE
from tests.parity.driver import check_parity, make_workload

pytestmark = pytest.mark.parity

WORKLOAD = make_workload(VOCAB_SIZE)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_reference(name: str, tmp_path: Path) -> None:
    reference = CASES[name].save(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "tokenizer.json").write_text("{}")  # never read here
    size = WORKLOAD.block_size
    build_engine(tmp_path / "checkpoint", tmp_path / "engine", target="cuda", block_size=size)
    runner = CudaRunner.open(
        load_engine_dir(tmp_path / "engine"),
        num_blocks=WORKLOAD.num_blocks,
        max_batch_size=len(WORKLOAD.sequences),
        max_context_len=64,
        device="cpu",
    )
    check_parity(reference, WORKLOAD, runner.forward)
    runner.close()
