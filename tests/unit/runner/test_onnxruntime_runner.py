from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from deepseek_triton.build.engine_dir import EngineDir, load_engine_dir
from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.errors import ConfigError, EngineMismatchError
from deepseek_triton.request import RequestKey, SamplingParams
from deepseek_triton.runner import onnxruntime as module
from deepseek_triton.runner import ort_model, ort_session
from deepseek_triton.runner.base import RowSampling, StepRow
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
from deepseek_triton.runner.ort_plan import CallCosts, plan_calls

NUM_BLOCKS = 24
NO_TOKENS = np.zeros(0, np.int32)
GREEDY = RowSampling(SamplingParams(), 0.0, None, NO_TOKENS, NO_TOKENS)
PROMPTS = [np.random.default_rng(i).integers(3, 4000, n) for i, n in enumerate((5, 37, 20))]
TABLES = [[3], [11, 0, 7], [2, 9]]


CONFIGS = {
    "latent": preset_config("v2"),
    "two_groups": preset_config("qwen2"),
    "one_head_a_group": preset_config("coder"),
    "one_group": preset_config("llama") | {"num_key_value_heads": 1, "head_dim": 128},
}


@pytest.fixture(scope="module", params=CONFIGS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    folder = tmp_path_factory.mktemp("engine")
    write_random_checkpoint(folder / "checkpoint", CONFIGS[request.param])
    build_engine(folder / "checkpoint", folder / "engine")
    return load_engine_dir(folder / "engine")


@pytest.fixture
def runner(engine: EngineDir) -> Iterator[OnnxRuntimeRunner]:
    runner = OnnxRuntimeRunner(engine, num_blocks=NUM_BLOCKS, num_threads=1)
    yield runner
    runner.close()


def row(
    prompt: NDArray[np.int64],
    table: list[int],
    begin: int = 0,
    end: int | None = None,
    sampling: RowSampling | None = GREEDY,
) -> StepRow:
    ids = prompt[begin:end].astype(np.int32)
    return StepRow(RequestKey("r"), ids, begin, np.array(table, np.int32), sampling)


def logits_of(runner: OnnxRuntimeRunner, *rows: StepRow) -> NDArray[np.float32]:
    order, logits = runner.forward(rows)
    aligned = np.full((len(rows), runner.vocab_size), np.nan, np.float32)
    aligned[order] = logits
    return aligned


@pytest.fixture
def expected(runner: OnnxRuntimeRunner) -> NDArray[np.float32]:
    """Logits of each prompt, run alone."""
    alone = [logits_of(runner, row(p, t))[0] for p, t in zip(PROMPTS, TABLES, strict=True)]
    return np.stack(alone)


def test_company_and_order_do_not_change_a_bit_of_a_row(
    runner: OnnxRuntimeRunner, expected: NDArray[np.float32]
) -> None:
    for order in ([0, 1, 2], [2, 0, 1], [2, 0]):
        together = logits_of(runner, *(row(PROMPTS[i], TABLES[i]) for i in order))
        np.testing.assert_array_equal(together, expected[order])


def test_a_decode_has_the_same_bits_alone_and_in_company_on_two_threads(engine: EngineDir) -> None:
    runner = OnnxRuntimeRunner(engine, num_blocks=NUM_BLOCKS, num_threads=2)
    prompts = [np.random.default_rng(i).integers(3, 4000, 3 + i) for i in range(NUM_BLOCKS)]
    prefill = [row(p, [i], 0, -1, None) for i, p in enumerate(prompts[:13])]
    runner.forward(prefill)
    last = [row(p, [i], len(p) - 1) for i, p in enumerate(prompts[:13])]
    everyone = logits_of(runner, *last)
    for begin, end in ((0, 1), (12, 13), (3, 5), (2, 10)):
        np.testing.assert_array_equal(logits_of(runner, *last[begin:end]), everyone[begin:end])
    runner.close()


def test_chunks_give_what_the_whole_prompt_gives(
    runner: OnnxRuntimeRunner, expected: NDArray[np.float32]
) -> None:
    prompt, table = PROMPTS[1], TABLES[1]
    for begin, end in ((0, 16), (16, 19), (19, 36)):
        assert runner.forward([row(prompt, table, begin, end, None)])[0] == []
    last = logits_of(runner, row(prompt, table, 36))
    np.testing.assert_array_equal(last[0], expected[1])


def test_a_chunk_cut_for_memory_gives_the_same(
    runner: OnnxRuntimeRunner,
    expected: NDArray[np.float32],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = CallCosts(8.0, 1000)
    monkeypatch.setattr(ort_model, "CPU_COSTS", costs)
    rows = [row(p, t) for p, t in zip(PROMPTS, TABLES, strict=True)]
    assert len(plan_calls(rows, num_heads=4, costs=costs)) > 3
    np.testing.assert_array_equal(logits_of(runner, *rows), expected)


def test_prefill_and_decode_mix_in_one_step(
    runner: OnnxRuntimeRunner, expected: NDArray[np.float32]
) -> None:
    runner.forward([row(PROMPTS[0], TABLES[0], 0, 4, None)])
    mixed = logits_of(runner, row(PROMPTS[1], TABLES[1]), row(PROMPTS[0], TABLES[0], 4))
    np.testing.assert_array_equal(mixed, expected[[1, 0]])


def test_rows_that_ask_for_no_token_hold_none(
    runner: OnnxRuntimeRunner, expected: NDArray[np.float32]
) -> None:
    result = runner.run((row(PROMPTS[0], [5], sampling=None), row(PROMPTS[1], TABLES[1])))
    assert result.token_ids.tolist() == [-1, int(expected[1].argmax())]
    assert np.isnan(result.log_probs).all()


def test_log_probs_come_when_asked(
    runner: OnnxRuntimeRunner, expected: NDArray[np.float32]
) -> None:
    asks = dataclasses.replace(GREEDY, params=SamplingParams(return_log_probs=True))
    result = runner.run((row(PROMPTS[0], [5], sampling=asks), row(PROMPTS[1], TABLES[1])))
    best = expected[0] - np.log(np.exp(expected[0].astype(np.float64)).sum())
    assert result.log_probs[0] == pytest.approx(best.max(), abs=1e-4)
    assert np.isnan(result.log_probs[1])


def test_only_the_slots_of_a_row_are_written(runner: OnnxRuntimeRunner) -> None:
    rows = [row(PROMPTS[0], [3], 0, 3), row(PROMPTS[2], [2], 0, 9), row(PROMPTS[1], [11, 0, 7])]
    calls = plan_calls(rows, num_heads=4)
    assert {p.row for p in calls[1]} == {0, 1}  # so that row 0 is padded
    for pool in runner._models[0]._pools:
        pool[:] = 7.0
    runner.forward(rows)
    for pool in runner._models[0]._pools:
        others = [b for b in range(NUM_BLOCKS) if b not in (3, 2, 11, 0, 7)]
        assert (pool[others] == 7.0).all()
        assert (pool[[11, 0]] != 7.0).any(axis=-1).all()
        for block, used in ((3, 3), (2, 9), (7, 5)):
            assert (pool[block, :used] != 7.0).any(axis=-1).all()
            assert (pool[block, used:] == 0.0).all()  # begun, and clear beyond the written part


def test_what_the_last_owner_left_in_a_block_is_gone(
    runner: OnnxRuntimeRunner, expected: NDArray[np.float32]
) -> None:
    for pool in runner._models[0]._pools:
        pool[:] = np.nan
    rows = [row(p, t) for p, t in zip(PROMPTS, TABLES, strict=True)]
    np.testing.assert_array_equal(logits_of(runner, *rows), expected)


def test_a_row_without_finite_logits_gets_no_token_and_harms_no_other(
    runner: OnnxRuntimeRunner, expected: NDArray[np.float32]
) -> None:
    chunks = [row(p, t, 0, -1, None) for p, t in zip(PROMPTS, TABLES, strict=True)]
    runner.forward(chunks)
    runner._models[0]._pools[0][TABLES[1][0], 5] = np.inf
    last = tuple(row(p, t, len(p) - 1) for p, t in zip(PROMPTS, TABLES, strict=True))
    result = runner.run(last)
    best = expected.argmax(axis=1).tolist()
    assert result.token_ids.tolist() == [best[0], -1, best[2]]


def test_the_threads_default_to_the_cores_of_the_process(
    engine: EngineDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(module, "available_cores", lambda: 3)
    monkeypatch.setattr(
        module,
        "open_session",
        lambda path, threads: seen.append(threads) or ort_session.open_session(path, 1),
    )
    OnnxRuntimeRunner(engine, num_blocks=1).close()
    assert seen == [3]


def test_pools_that_do_not_fit_name_the_bytes_and_the_setting(engine: EngineDir) -> None:
    with pytest.raises(
        ConfigError, match=r"need [\d,]+ bytes.*lower kv_cache_num_blocks"
    ) as caught:
        OnnxRuntimeRunner(engine, num_blocks=10**9)
    assert str(caught.value).startswith("1000000000 KV blocks "), "as many as were asked for"


@pytest.mark.parametrize("setting", [{"num_blocks": 0}, {"num_blocks": 4, "num_threads": -1}])
def test_settings_out_of_range_are_named(engine: EngineDir, setting: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=list(setting)[-1]):
        OnnxRuntimeRunner(engine, **setting)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "tensorrt"}, "built for 'tensorrt'"),
        ({"versions": {"onnxruntime": "1.2.3"}}, r"built for ONNX Runtime 1\.2\.3"),
        ({"versions": {}}, "built for ONNX Runtime none"),
    ],
)
def test_an_engine_of_another_runtime_is_refused(
    engine: EngineDir, changes: dict[str, object], message: str
) -> None:
    manifest = dataclasses.replace(engine.manifest, **changes)  # type: ignore[arg-type]
    with pytest.raises(EngineMismatchError, match=f"{message}.*make engine"):
        OnnxRuntimeRunner(EngineDir(engine.path, manifest), num_blocks=4)


def test_a_model_that_the_runtime_refuses_is_named(engine: EngineDir, tmp_path: Path) -> None:
    (tmp_path / engine.manifest.model_file).write_bytes(b"not a model")
    with pytest.raises(EngineMismatchError, match=r"model.onnx: ONNX Runtime .* cannot load"):
        OnnxRuntimeRunner(EngineDir(tmp_path, engine.manifest), num_blocks=4)


def test_a_closed_runner_runs_nothing(runner: OnnxRuntimeRunner) -> None:
    runner.close()
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.forward([row(PROMPTS[0], TABLES[0])])
