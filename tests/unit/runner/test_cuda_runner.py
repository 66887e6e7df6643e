"""The cuda runner in plain PyTorch on the CPU: everything but kernels and CUDA graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from deepseek_triton.build.engine_dir import EngineDir, load_engine_dir  # noqa: E402
from deepseek_triton.build.pipeline import build_engine  # noqa: E402
from deepseek_triton.calibrate.quantize import QuantizeOptions, quantize_checkpoint  # noqa: E402
from deepseek_triton.checkpoint.presets import preset_config  # noqa: E402
from deepseek_triton.checkpoint.random import write_random_checkpoint  # noqa: E402
from deepseek_triton.errors import ConfigError, EngineMismatchError  # noqa: E402
from deepseek_triton.request import RequestKey, SamplingParams  # noqa: E402
from deepseek_triton.runner import cuda_sampling, cuda_warm_up  # noqa: E402
from deepseek_triton.runner.base import RowSampling, StepRow, WaitingRunner  # noqa: E402
from deepseek_triton.runner.cuda import CudaRunner  # noqa: E402
from deepseek_triton.runner.cuda_graphs import PROMPT_BUCKETS, Outputs, PromptBuckets  # noqa: E402
from deepseek_triton.runner.cuda_step import Step  # noqa: E402
from deepseek_triton.runner.cuda_warm_up import step_sizes, warm_up  # noqa: E402
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner  # noqa: E402

NUM_BLOCKS = 24
NO_TOKENS = np.zeros(0, np.int32)
GREEDY = RowSampling(SamplingParams(), 0.0, None, NO_TOKENS, NO_TOKENS)
LOG_PROBS = dataclasses.replace(GREEDY, params=SamplingParams(return_log_probs=True))
PROMPTS = [np.random.default_rng(i).integers(3, 4000, n) for i, n in enumerate((5, 37, 20))]
TABLES = [[3], [11, 0, 7], [2, 9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    write_random_checkpoint(folder / "checkpoint", preset_config("v2"))
    build_engine(folder / "checkpoint", folder / "cuda", target="cuda", block_size=16)
    build_engine(folder / "checkpoint", folder / "onnxruntime")
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> EngineDir:
    return load_engine_dir(folder / "cuda")


@pytest.fixture
def runner(engine: EngineDir) -> Iterator[CudaRunner]:
    runner = CudaRunner.open(engine, num_blocks=NUM_BLOCKS, max_batch_size=3, device="cpu")
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def expected(folder: Path) -> NDArray[np.float32]:
    """Logits of each prompt by ONNX Runtime."""
    runner = OnnxRuntimeRunner.load(folder / "onnxruntime", num_blocks=NUM_BLOCKS, num_threads=1)
    rows = [row(p, t) for p, t in zip(PROMPTS, TABLES, strict=True)]
    order, logits = runner.forward(rows)
    aligned = np.empty_like(logits)
    aligned[order] = logits
    runner.close()
    return aligned


def row(
    prompt: NDArray[np.int64],
    table: list[int],
    begin: int = 0,
    end: int | None = None,
    sampling: RowSampling | None = GREEDY,
) -> StepRow:
    ids = prompt[begin:end].astype(np.int32)
    return StepRow(RequestKey("r"), ids, begin, np.array(table, np.int32), sampling)


def close(got: NDArray[np.float32], want: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-4)


def test_whole_prompts_give_the_logits_of_onnx_runtime(
    runner: CudaRunner, expected: NDArray[np.float32]
) -> None:
    close(runner.forward([row(p, t) for p, t in zip(PROMPTS, TABLES, strict=True)]), expected)


def test_chunks_and_decodes_give_what_whole_prompts_give(
    runner: CudaRunner, expected: NDArray[np.float32]
) -> None:
    first = [row(p, t, 0, 4, None) for p, t in zip(PROMPTS, TABLES, strict=True)]
    runner.forward(first)
    runner.forward([row(PROMPTS[1], TABLES[1], 4, 36), row(PROMPTS[2], TABLES[2], 4, 19)])
    last = [row(p, t, len(p) - 1) for p, t in zip(PROMPTS, TABLES, strict=True)]
    close(runner.forward(last), expected)


def test_prefill_and_decode_mix_in_one_step(
    runner: CudaRunner, expected: NDArray[np.float32]
) -> None:
    runner.forward([row(PROMPTS[0], TABLES[0], 0, 4, None)])
    mixed = runner.forward([row(PROMPTS[1], TABLES[1]), row(PROMPTS[0], TABLES[0], 4)])
    close(mixed, expected[[1, 0]])


def test_what_other_requests_left_in_the_pools_is_never_read(
    runner: CudaRunner, expected: NDArray[np.float32]
) -> None:
    for pool in runner._pools.values():
        pool.fill_(float("nan"))
    rows = [row(p, t, 0, -1, None) for p, t in zip(PROMPTS, TABLES, strict=True)]
    runner.forward(rows)
    last = [row(p, t, len(p) - 1) for p, t in zip(PROMPTS[:2], TABLES[:2], strict=True)]
    close(runner.forward(last), expected[:2])  # a bucket of two, then one with a padding row
    runner.forward([row(PROMPTS[2], TABLES[2], 19)])
    rows = [row(p, t, len(p) - 1) for p, t in zip(PROMPTS, TABLES, strict=True)]
    close(runner.forward(rows), expected)


def test_only_the_slots_of_the_rows_are_written(runner: CudaRunner) -> None:
    for pool in runner._pools.values():
        pool.fill_(7.0)
    runner.forward([row(PROMPTS[0], [3], 0, 3), row(PROMPTS[2], [2], 0, 9)])
    runner.forward([row(PROMPTS[0], [3], 3, 4)])
    for pool in runner._pools.values():
        for block in range(NUM_BLOCKS):
            used = {3: 4, 2: 9}.get(block, 0)
            assert (pool[block, :used] != 7.0).any(-1).all()
            assert (pool[block, used:] == 7.0).all()


def test_greedy_tokens_and_log_probs(runner: CudaRunner, expected: NDArray[np.float32]) -> None:
    rows = (
        row(PROMPTS[0], TABLES[0], sampling=LOG_PROBS),
        row(PROMPTS[1], TABLES[1], sampling=None),
        row(PROMPTS[2], TABLES[2]),
    )
    result = runner.run(rows)
    best = expected.argmax(1)
    assert result.token_ids.tolist() == [best[0], -1, best[2]]
    wide = expected[0].astype(np.float64)
    assert result.log_probs[0] == pytest.approx(wide.max() - np.log(np.exp(wide).sum()), abs=1e-4)
    assert np.isnan(result.log_probs[1:]).all()


def test_a_row_that_draws_does_not_change_a_greedy_neighbour(
    runner: CudaRunner, expected: NDArray[np.float32]
) -> None:
    best = expected.argmax(1)
    banned = dataclasses.replace(GREEDY, banned_id=int(best[0]))
    result = runner.run((row(PROMPTS[0], TABLES[0], sampling=banned), row(PROMPTS[2], TABLES[2])))
    second = np.argsort(-expected[0])[1]
    assert result.token_ids.tolist() == [second, best[2]]


def test_a_row_without_finite_logits_gets_no_token_and_harms_no_other(
    runner: CudaRunner, expected: NDArray[np.float32]
) -> None:
    chunks = [row(p, t, 0, -1, None) for p, t in zip(PROMPTS, TABLES, strict=True)]
    runner.forward(chunks)
    next(iter(runner._pools.values()))[TABLES[1][0], 5] = float("inf")
    last = tuple(row(p, t, len(p) - 1) for p, t in zip(PROMPTS, TABLES, strict=True))
    best = expected.argmax(1)
    assert runner.run(last).token_ids.tolist() == [best[0], -1, best[2]]


def test_scores_are_those_of_onnx_runtime(folder: Path, runner: CudaRunner) -> None:
    exact = OnnxRuntimeRunner.load(folder / "onnxruntime", num_blocks=NUM_BLOCKS, num_threads=1)
    steps = [
        (scored(PROMPTS[0], TABLES[0], 0, 4), scored(PROMPTS[1], TABLES[1], 0, 20)),
        (scored(PROMPTS[2], TABLES[2], 0, 19), scored(PROMPTS[1], TABLES[1], 20, 36)),
        (scored(PROMPTS[0], TABLES[0], 3, 4),),  # one token, already scored: the same again
    ]
    for step in steps:
        for got, want in zip(runner.score(step), exact.score(step), strict=True):
            np.testing.assert_allclose(got.log_probs, want.log_probs, atol=1e-4)
            np.testing.assert_array_equal(got.best_ids, want.best_ids)
    exact.close()


def scored(prompt: NDArray[np.int64], table: list[int], begin: int, end: int) -> StepRow:
    following = int(prompt[end])
    return dataclasses.replace(row(prompt, table, begin, end, None), next_token_id=following)


def test_a_token_without_finite_logits_is_scored_nan_and_the_others_as_ever(
    runner: CudaRunner,
) -> None:
    rows = (scored(PROMPTS[0], TABLES[0], 0, 4), scored(PROMPTS[1], TABLES[1], 5, 36))
    runner.score((scored(PROMPTS[1], TABLES[1], 0, 36),))
    before = runner.score(rows)
    next(iter(runner._pools.values()))[TABLES[1][0], 2] = float("inf")
    after = runner.score(rows)
    np.testing.assert_array_equal(after[0].log_probs, before[0].log_probs)
    assert np.isnan(after[1].log_probs).all()
    assert (after[1].best_ids == -1).all()
    assert np.isfinite(before[1].log_probs).all()


def test_the_pool_is_sized_from_what_the_weights_leave(engine: EngineDir) -> None:
    seen: list[int] = []
    runner = CudaRunner.open(engine, num_blocks=lambda free: seen.append(free) or 5, device="cpu")
    assert runner.num_blocks == 5
    assert seen[0] > 1 << 20


def test_pools_that_do_not_fit_name_the_bytes_and_the_setting(engine: EngineDir) -> None:
    with pytest.raises(ConfigError, match=r"need [\d,]+ bytes.*lower kv_cache_num_blocks .DEEP"):
        CudaRunner.open(engine, num_blocks=10**9, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so(engine: EngineDir) -> None:
    with pytest.raises(ConfigError, match=r"no usable NVIDIA GPU.*TARGET=onnxruntime"):
        CudaRunner.open(engine, num_blocks=4)


def test_an_engine_of_another_target_is_refused(folder: Path) -> None:
    with pytest.raises(EngineMismatchError, match="built for 'onnxruntime'"):
        CudaRunner.open(load_engine_dir(folder / "onnxruntime"), num_blocks=4, device="cpu")


def test_a_truncated_weights_file_is_refused(folder: Path, tmp_path: Path) -> None:
    engine = load_engine_dir(folder / "cuda")
    for name in (engine.manifest.model_file, "weights.bin"):
        (tmp_path / name).write_bytes((folder / "cuda" / name).read_bytes())
    with (tmp_path / "weights.bin").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(EngineMismatchError, match="weights.bin: 1000 bytes, the model reads"):
        CudaRunner.open(EngineDir(tmp_path, engine.manifest), num_blocks=4, device="cpu")


def test_a_closed_runner_runs_nothing(runner: CudaRunner) -> None:
    runner.close()
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.forward([row(PROMPTS[0], TABLES[0])])


@pytest.mark.parametrize("symmetric", [True, False])
def test_an_int4_engine_gives_the_logits_of_onnx_runtime(tmp_path: Path, symmetric: bool) -> None:
    write_random_checkpoint(tmp_path / "original", preset_config("v2-lite"))
    options = QuantizeOptions("rtn", 32, symmetric)
    quantize_checkpoint(tmp_path / "original", tmp_path / "checkpoint", options, [])
    build_engine(tmp_path / "checkpoint", tmp_path / "cuda", target="cuda", block_size=16)
    build_engine(tmp_path / "checkpoint", tmp_path / "onnxruntime", int4_accuracy_level=0)
    whole = row(PROMPTS[1], TABLES[1])
    exact = OnnxRuntimeRunner.load(tmp_path / "onnxruntime", num_blocks=NUM_BLOCKS, num_threads=1)
    _, want = exact.forward([whole])
    ours = CudaRunner.open(load_engine_dir(tmp_path / "cuda"), num_blocks=NUM_BLOCKS, device="cpu")
    assert {call.op for call in ours._model.program.calls} >= {"deepseek.ExpertsInt4"}  # type: ignore[union-attr]
    close(ours.forward([whole]), want)
    ours.close()
    exact.close()


@pytest.mark.parametrize("limit", [1, 16, 100, 256, 8192])
def test_warm_up_meets_odd_counts_and_multiples_of_16_in_each_size_class(limit: int) -> None:
    counts = list(step_sizes(limit))
    assert counts == sorted(set(counts)) and counts[-1] == limit
    for low in (16, 32, 64, 128, 1024, 4096):
        found = [count for count in counts if low <= count < 2 * low]
        if limit >= 2 * low:
            assert any(count % 16 for count in found) and not all(count % 16 for count in found)


def test_warm_up_runs_prefill_with_and_without_context_and_chooses_in_every_way(
    runner: CudaRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Step] = []
    chosen: list[RowSampling] = []

    def compute(step: Step) -> Outputs:
        steps.append(step)
        return runner._infer(step)

    def choose(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
        assert len(logits) == len(rows) == 1
        chosen.extend(rows)
        return cuda_sampling.choose(logits, rows)

    monkeypatch.setattr(cuda_warm_up, "choose", choose)
    warm_up(compute, runner._pools, 150, torch.device("cpu"))
    contexts = [step.attention.key_slots is not None for step in steps]
    assert contexts == [False, True] * (len(steps) // 2)
    assert [len(step.input_ids) for step in steps[::2]] == list(step_sizes(150))
    assert not any(row.plain for row in chosen)
    # Kernels are compiled for arguments that are there or not: token counts, and banned ids.
    kinds = {(row.params.penalized, row.banned_id is not None) for row in chosen}
    assert len(kinds) == len(chosen) == 4


@pytest.mark.parametrize("lengths", [(5, 37, 20), (3,) * 20, (50, 2), (700, 700)])
def test_prompts_packed_into_a_bucket_give_the_same_logits(
    engine: EngineDir, lengths: tuple[int, ...]
) -> None:
    runner = CudaRunner.open(engine, num_blocks=120, max_batch_size=3, device="cpu")
    buckets = PromptBuckets(runner._infer, runner._pools, torch.device("cpu"))
    rng, rows, block = np.random.default_rng(0), [], 0
    for length in lengths:
        needed = -(-length // 16)
        rows.append(row(rng.integers(3, 4000, length), list(range(block, block + needed))))
        block += needed
    assert buckets.hold(rows)
    with torch.inference_mode():
        logits = buckets.run(rows)[0]
    close(logits.float().numpy(), runner.forward(rows))
    assert not buckets.hold([dataclasses.replace(rows[0], context_len=1)])
    runner.close()


def test_what_no_bucket_holds_runs_call_by_call(runner: CudaRunner) -> None:
    buckets = PromptBuckets(runner._infer, runner._pools, torch.device("cpu"))
    most, num_rows = PROMPT_BUCKETS[-1]
    tokens = np.zeros(most, np.int32)
    assert buckets.hold([row(tokens, [0])])
    assert not buckets.hold([row(np.zeros(most + 1, np.int32), [0])])
    assert not buckets.hold([row(tokens[:1], [0])] * (num_rows + 1))


def test_others_get_their_turn_while_the_device_works(
    runner: CudaRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[str] = []
    monkeypatch.setattr(runner, "meanwhile", lambda: turns.append("turn"))
    assert isinstance(runner, WaitingRunner)
    runner.run((row(np.array([5], np.int32), [0]),))
    assert turns == ["turn"]  # once launched
    turns.clear()
    runner.run((row(np.array([5, 6], np.int32), [0]),))
    assert turns == ["turn"] * 2  # before a launch call by call, and after it
