"""Drafts change how fast tokens come, never which ones: the demo model with and without."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from deepseek_triton.build.pipeline import build_engine, is_current
from deepseek_triton.checkpoint.names import EMBEDDING
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.config import SchedulerConfig
from deepseek_triton.engine.engine import StepEngine
from deepseek_triton.errors import CheckpointError
from deepseek_triton.metrics import EngineStats
from deepseek_triton.request import FinishReason, Request, RequestKey, SamplingParams
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
from deepseek_triton.text.tokenizer import Tokenizer
from tests.unit.engine.scripted_runner import Collector

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
HEADS = (
    "def clip(value, lower, upper):\n",
    "class Point:\n    def __init__(self, x, y):\n",
    "import os\n\n\ndef find_files(folder, suffix):\n" * 3,
)
SAMPLINGS = {
    "greedy": SamplingParams(return_log_probs=True),
    "random": SamplingParams(temperature=0.9, seed=7, return_log_probs=True),
    "penalized": SamplingParams(
        temperature=0.7, top_k=20, top_p=0.9, seed=3, repetition_penalty=1.2, frequency_penalty=0.3
    ),
    "at least 30": SamplingParams(min_tokens=30),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("drafts")
    build_engine(DEMO, folder / "plain")
    build_engine(DEMO, folder / "drafting", draft=True)
    return folder / "plain", folder / "drafting"


def generate(
    engine_dir: Path, sampling: SamplingParams, *, num_blocks: int = 64, end_id: int | None = None
) -> tuple[list[Collector], EngineStats]:
    tokenizer = Tokenizer.load(engine_dir)
    runner = OnnxRuntimeRunner.load(engine_dir, num_blocks=num_blocks, num_threads=1)
    config = SchedulerConfig(max_batch_size=4, max_tokens_per_step=24)
    engine = StepEngine(runner, config)
    taken = [Collector() for _ in HEADS]
    for index, (head, collector) in enumerate(zip(HEADS, taken, strict=True)):
        key, prompt = RequestKey(str(index)), tuple(tokenizer.encode(head))
        engine.submit(Request(key, prompt, 40, sampling, end_id), collector)
    while engine.has_requests:
        engine.step()
        engine.check_integrity()
    stats = engine.stats()
    engine.close()
    return taken, stats


def answers(taken: list[Collector]) -> list[tuple[list[int], list[float], FinishReason]]:
    return [(t.tokens, t.log_probs, t.finish_reason) for t in taken]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_and_log_probs_are_those_without_drafts(
    engines: tuple[Path, Path], name: str
) -> None:
    expected, _ = generate(engines[0], SAMPLINGS[name])
    taken, stats = generate(engines[1], SAMPLINGS[name])
    assert answers(taken) == answers(expected)
    assert 0 < stats.draft_tokens_accepted_total < stats.draft_tokens_total


def test_an_end_id_among_accepted_drafts_ends_the_request_there(
    engines: tuple[Path, Path],
) -> None:
    tokens = generate(engines[0], SamplingParams())[0][0].tokens
    for end_id in {tokens[9], tokens[10]}:
        expected, _ = generate(engines[0], SamplingParams(), end_id=end_id)
        taken, _ = generate(engines[1], SamplingParams(), end_id=end_id)
        assert answers(taken) == answers(expected)
        assert taken[0].finish_reason is FinishReason.STOP


def test_preempted_requests_come_to_the_same(engines: tuple[Path, Path]) -> None:
    expected, _ = generate(engines[0], SAMPLINGS["random"])
    taken, stats = generate(engines[1], SAMPLINGS["random"], num_blocks=8)
    assert stats.preemptions_total > 0
    assert answers(taken) == answers(expected)


def test_drafts_that_are_always_wrong_cost_time_only(
    engines: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = generate(engines[0], SAMPLINGS["greedy"])
    monkeypatch.setattr(
        OnnxRuntimeRunner, "_draft", lambda self, rows, *_: {i: (4000,) for i in range(len(rows))}
    )
    taken, stats = generate(engines[1], SAMPLINGS["greedy"])
    assert answers(taken) == answers(expected)
    assert stats.draft_tokens_total > 50
    assert stats.draft_tokens_accepted_total == 0


def test_a_wrong_draft_that_overflows_harms_nobody(
    engines: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loud = 4000
    shutil.copytree(DEMO, tmp_path / "demo")
    for file in (tmp_path / "demo").glob("*.safetensors"):
        tensors = load_file(file)
        if EMBEDDING in tensors:
            tensors[EMBEDDING][loud] = 1e25
            save_file(tensors, file)
    build_engine(tmp_path / "demo", tmp_path / "engine", draft=True)
    expected, _ = generate(engines[0], SAMPLINGS["greedy"])
    monkeypatch.setattr(
        OnnxRuntimeRunner, "_draft", lambda self, rows, *_: {i: (loud,) for i in range(len(rows))}
    )
    taken, stats = generate(tmp_path / "engine", SAMPLINGS["greedy"])
    assert answers(taken) == answers(expected)
    assert stats.draft_tokens_total > 50


def test_the_first_draft_is_mostly_right(engines: tuple[Path, Path]) -> None:
    _, stats = generate(engines[1], SamplingParams())
    assert stats.draft_tokens_accepted_total > 0.6 * stats.draft_tokens_total


def test_an_engine_with_drafts_is_another_engine(engines: tuple[Path, Path]) -> None:
    plain, drafting = engines
    assert is_current(drafting, DEMO, draft=True)
    assert not is_current(drafting, DEMO)
    assert not is_current(plain, DEMO, draft=True)


def test_a_checkpoint_with_a_part_of_the_layer_is_refused_by_the_tensor(tmp_path: Path) -> None:
    folder = write_random_checkpoint(tmp_path / "v3", preset_config("v3"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.4.enorm.weight"] = tensors["model.layers.3.input_layernorm.weight"].copy()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"eh_proj\.weight: missing"):
        build_engine(folder, tmp_path / "engine", draft=True)
    assert not (tmp_path / "engine").exists()
