"""Drafts on the cuda runner change how fast tokens come, not which; in plain PyTorch on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from deepseek_triton.build.engine_dir import load_engine_dir  # noqa: E402
from deepseek_triton.build.pipeline import build_engine  # noqa: E402
from deepseek_triton.config import SchedulerConfig  # noqa: E402
from deepseek_triton.engine.engine import StepEngine  # noqa: E402
from deepseek_triton.metrics import EngineStats  # noqa: E402
from deepseek_triton.request import Request, RequestKey, SamplingParams  # noqa: E402
from deepseek_triton.runner.cuda import CudaRunner  # noqa: E402
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner  # noqa: E402
from deepseek_triton.text.tokenizer import Tokenizer  # noqa: E402
from tests.unit.engine.scripted_runner import Collector  # noqa: E402

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
HEADS = (
    "def clip(value, lower, upper):\n",
    "class Point:\n    def __init__(self, x, y):\n",
    "import os\n\n\ndef find_files(folder, suffix):\n" * 3,
)
SAMPLINGS = (
    SamplingParams(return_log_probs=True),
    SamplingParams(temperature=0.9, seed=7, return_log_probs=True),
    SamplingParams(
        temperature=0.7, top_k=20, top_p=0.9, seed=3, repetition_penalty=1.2, min_tokens=9
    ),
)
Answers = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafts")
    for target in ("cuda", "onnxruntime"):
        build_engine(DEMO, folder / target, target=target, draft=True, block_size=16)
    build_engine(DEMO, folder / "plain", target="cuda", block_size=16)
    return {name: folder / name for name in ("plain", "cuda", "onnxruntime")}


def generate(folder: Path) -> tuple[Answers, EngineStats]:
    runner: CudaRunner | OnnxRuntimeRunner
    if folder.name == "onnxruntime":
        runner = OnnxRuntimeRunner.load(folder, num_blocks=64, num_threads=1)
    else:
        loaded = load_engine_dir(folder)
        runner = CudaRunner.open(loaded, num_blocks=64, max_batch_size=4, device="cpu")
    tokenizer = Tokenizer.load(folder)
    engine = StepEngine(runner, SchedulerConfig(max_batch_size=4, max_tokens_per_step=24))
    taken = [Collector() for _ in HEADS]
    for index, (head, collector) in enumerate(zip(HEADS, taken, strict=True)):
        key, prompt = RequestKey(str(index)), tuple(tokenizer.encode(head))
        engine.submit(Request(key, prompt, 12, SAMPLINGS[index]), collector)
    while engine.has_requests:
        engine.step()
    stats = engine.stats()
    engine.close()
    return [(t.tokens, t.log_probs) for t in taken], stats


def test_tokens_are_those_without_drafts_and_guesses_those_of_onnx_runtime(
    engines: dict[str, Path],
) -> None:
    expected, _ = generate(engines["plain"])
    answers, stats = generate(engines["cuda"])
    for (tokens, log_probs), (want, want_log_probs) in zip(answers, expected, strict=True):
        assert tokens == want
        assert log_probs == pytest.approx(want_log_probs, abs=1e-4)
    assert 0 < stats.draft_tokens_accepted_total < stats.draft_tokens_total
    others, theirs = generate(engines["onnxruntime"])
    assert [tokens for tokens, _ in others] == [tokens for tokens, _ in answers]
    assert stats.draft_tokens_accepted_total == theirs.draft_tokens_accepted_total
    assert stats.draft_tokens_total == theirs.draft_tokens_total
    assert stats.steps_total == theirs.steps_total


def test_weights_of_both_models_are_loaded_once(engines: dict[str, Path]) -> None:
    runner = CudaRunner.open(load_engine_dir(engines["cuda"]), num_blocks=4, device="cpu")
    model, drafter = runner._model, runner._drafter
    assert model is not None
    assert drafter is not None
    for name in ("embedding.weight", "final_norm.weight"):
        assert drafter._model.weights[name] is model.weights[name]
    runner.close()
