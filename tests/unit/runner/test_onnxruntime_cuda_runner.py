"""The runner of the CUDA provider, on the CPU provider: the same graph, bindings and buffers."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from deepseek_triton.backend.opening import open_engine
from deepseek_triton.build.engine_dir import EngineDir, load_engine_dir
from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.build.targets import ONNXRUNTIME_GPU
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.config import EngineConfig
from deepseek_triton.errors import ConfigError, EngineMismatchError
from deepseek_triton.kv_cache.spec import KVCacheSpec
from deepseek_triton.request import RequestKey, SamplingParams
from deepseek_triton.runner import onnxruntime_cuda, ort_cuda, ort_cuda_model
from deepseek_triton.runner.base import RowSampling, StepRow
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
from deepseek_triton.runner.onnxruntime_cuda import OnnxRuntimeCudaRunner
from deepseek_triton.runner.ort_cuda_model import rounded
from deepseek_triton.runner.ort_plan import CallCosts

NUM_BLOCKS = 24
NO_TOKENS = np.zeros(0, np.int32)
TOLERANCE = 1e-4
PROMPTS = [np.random.default_rng(i).integers(3, 4000, n) for i, n in enumerate((5, 37, 20))]
TABLES = [[3], [11, 0, 7], [2, 9]]


def sampling(**params: Any) -> RowSampling:
    return RowSampling(SamplingParams(**params), 0.0, None, NO_TOKENS, NO_TOKENS)


GREEDY = sampling(return_log_probs=True)


def row(
    prompt: NDArray[np.int64],
    table: list[int],
    begin: int = 0,
    end: int | None = None,
    wanted: RowSampling | None = GREEDY,
) -> StepRow:
    ids = prompt[begin:end].astype(np.int32)
    return StepRow(RequestKey("r"), ids, begin, np.array(table, np.int32), wanted)


PREFILL = tuple(row(p, t, 0, -1, None) for p, t in zip(PROMPTS, TABLES, strict=True))
DECODE = tuple(row(p, t, len(p) - 1) for p, t in zip(PROMPTS, TABLES, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines of one checkpoint for either provider."""
    folder = tmp_path_factory.mktemp("engines")
    write_random_checkpoint(folder / "checkpoint", preset_config("v2"))
    for provider in ("cpu", "cuda"):
        build_engine(folder / "checkpoint", folder / provider, provider=provider)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> EngineDir:
    return load_engine_dir(folder / "cuda")


@pytest.fixture
def runner(engine: EngineDir) -> Iterator[OnnxRuntimeCudaRunner]:
    runner = OnnxRuntimeCudaRunner(engine, num_blocks=NUM_BLOCKS, device="cpu")
    for pool in pools(runner).values():  # of the block's last owner, or of nobody
        pool.update_inplace(np.full(pool.shape(), np.nan, np.float32))
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def expected(folder: Path) -> NDArray[np.float32]:
    runner = OnnxRuntimeRunner.load(folder / "cpu", num_blocks=NUM_BLOCKS, num_threads=1)
    _, logits = runner.forward([row(p, t) for p, t in zip(PROMPTS, TABLES, strict=True)])
    runner.close()
    return np.array(logits)


def pools(runner: OnnxRuntimeCudaRunner) -> dict[str, ort.OrtValue]:
    return runner._model._pools


def assert_close(got: NDArray[np.float32], want: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


def test_prefill_and_recorded_decodes_give_the_cpu_engines_logits(
    runner: OnnxRuntimeCudaRunner, expected: NDArray[np.float32]
) -> None:
    assert runner.forward(PREFILL)[0] == []
    assert_close(runner.forward(DECODE)[1], expected)
    # The same buffers serve the next call of their shape; another batch gets its own.
    assert_close(runner.forward(DECODE)[1], expected)
    assert len(runner._model._recorded) == 1
    assert_close(runner.forward(DECODE[:2])[1], expected[:2])
    assert len(runner._model._recorded) == 2


def test_rows_that_fill_up_a_batch_write_nothing_that_is_read(
    runner: OnnxRuntimeCudaRunner, expected: NDArray[np.float32]
) -> None:
    five = [row(PROMPTS[2], [i, i + 10], 0, -1, None) for i in range(3, 8)]
    runner.forward(five)
    before = {name: pool.numpy().copy() for name, pool in pools(runner).items()}
    last = [row(PROMPTS[2], [i, i + 10], 19) for i in range(3, 8)]
    _, logits = runner.forward(last)  # five rows in a batch of six
    assert_close(logits, np.repeat(expected[2:], 5, axis=0))
    written = {(i + 10, 19 % 16) for i in range(3, 8)}
    for name, pool in pools(runner).items():
        changed = ~np.isclose(pool.numpy(), before[name], equal_nan=True, rtol=0, atol=0)
        slots = {tuple(slot) for slot in np.argwhere(changed.any(axis=-1)).tolist()}
        scratch = {slot for slot in slots if slot[0] == NUM_BLOCKS}
        assert slots - scratch == written


def test_chunks_give_what_the_whole_prompt_gives(
    runner: OnnxRuntimeCudaRunner, expected: NDArray[np.float32]
) -> None:
    for begin, end in ((0, 16), (16, 17), (17, 36)):
        assert runner.forward([row(PROMPTS[1], TABLES[1], begin, end, None)])[0] == []
    assert_close(runner.forward([row(PROMPTS[1], TABLES[1], 36)])[1], expected[1:2])


def test_a_prompt_cut_for_memory_gives_the_same(
    runner: OnnxRuntimeCudaRunner,
    expected: NDArray[np.float32],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ort_cuda_model, "GPU_COSTS", CallCosts(8.0, 1000))
    whole = [row(p, t) for p, t in zip(PROMPTS, TABLES, strict=True)]
    assert_close(runner.forward(whole)[1], expected)


def test_a_step_of_prefill_and_decode(
    runner: OnnxRuntimeCudaRunner, expected: NDArray[np.float32]
) -> None:
    runner.forward(PREFILL[1:2])
    step = (row(PROMPTS[0], TABLES[0]), DECODE[1], row(PROMPTS[2], TABLES[2], wanted=None))
    order, logits = runner.forward(step)
    assert order == [0, 1]
    assert_close(logits, expected[:2])


@pytest.mark.parametrize(
    "step", [PREFILL[:0] + DECODE, tuple(row(p, t) for p, t in zip(PROMPTS, TABLES, strict=True))]
)
def test_a_greedy_step_gives_what_the_sampler_gives(
    runner: OnnxRuntimeCudaRunner,
    expected: NDArray[np.float32],
    step: tuple[StepRow, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner.forward(PREFILL)
    monkeypatch.setattr(onnxruntime_cuda, "sample", None)  # not even called
    result = runner.run(step)
    wide = expected.astype(np.float64)
    log_probs = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    np.testing.assert_array_equal(result.token_ids, expected.argmax(axis=1))
    np.testing.assert_allclose(result.log_probs, log_probs.max(axis=1), atol=TOLERANCE)


def test_a_step_that_asks_for_more_reads_the_logits(
    runner: OnnxRuntimeCudaRunner, expected: NDArray[np.float32]
) -> None:
    runner.forward(PREFILL)
    biased = sampling(logit_bias=((7, 1000.0),), top_log_probs=2)
    quiet = sampling()
    step = (
        row(PROMPTS[0], TABLES[0], 4, wanted=biased),
        row(PROMPTS[1], TABLES[1], 36, wanted=quiet),
        row(PROMPTS[2], TABLES[2], 19, wanted=None),
    )
    result = runner.run(step)
    assert result.token_ids.tolist() == [7, expected[1].argmax(), -1]
    assert np.isnan(result.log_probs[1:]).all()
    assert [len(tops) for tops in result.top_log_probs] == [2, 0, 0]
    assert result.top_log_probs[0][0][0] == expected[0].argmax()


def best_of(
    runner: OnnxRuntimeCudaRunner, monkeypatch: pytest.MonkeyPatch, logits: NDArray[np.float32]
) -> tuple[list[int], NDArray[np.float32]]:
    """What a greedy step makes of these logits."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :8]
    with np.errstate(all="ignore"):
        values = np.take_along_axis(logits, order, axis=1)
        totals = np.exp(logits - values[:, :1]).sum(axis=1, keepdims=True)
    places = [[i] for i in range(len(logits))]

    def forward(rows: Any, names: Any) -> Any:
        return [values, order, totals], places, ()

    monkeypatch.setattr(runner._model, "_forward", forward)
    result = runner.run(DECODE[: len(logits)])
    return result.token_ids.tolist(), result.log_probs


def test_of_equal_logits_the_lowest_id_is_chosen(
    runner: OnnxRuntimeCudaRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = np.zeros((1, runner.vocab_size), np.float32)
    logits[0, [900, 30, 4000]] = 5
    values = np.array([[5.0, 5, 5, 0, 0, 0, 0, 0]], np.float32)
    ids = np.array([[900, 4000, 30, 1, 2, 3, 4, 5]])
    totals = np.exp(logits - 5).sum(axis=1, keepdims=True)
    monkeypatch.setattr(runner._model, "_forward", lambda *_: ([values, ids, totals], [[0]], ()))
    assert runner.run(DECODE[:1]).token_ids.tolist() == [30]


@pytest.mark.parametrize("bad", [np.nan, np.inf, "all -inf", "all 0"])
def test_logits_that_are_no_answer_give_no_token(
    runner: OnnxRuntimeCudaRunner, monkeypatch: pytest.MonkeyPatch, bad: float | str
) -> None:
    logits = np.random.default_rng(0).normal(size=(2, runner.vocab_size)).astype(np.float32)
    if isinstance(bad, str):
        logits[1] = -np.inf if "inf" in bad else 0
    else:
        logits[1, 77] = bad
    token_ids, log_probs = best_of(runner, monkeypatch, logits)
    assert token_ids == [logits[0].argmax(), -1]
    assert np.isfinite(log_probs).tolist() == [True, False]


def test_scores_equal_the_cpu_engines(folder: Path, runner: OnnxRuntimeCudaRunner) -> None:
    rows = tuple(
        StepRow(RequestKey("r"), p.astype(np.int32), 0, np.array(t, np.int32), None, (), (), 9)
        for p, t in zip(PROMPTS, TABLES, strict=True)
    )
    other = OnnxRuntimeRunner.load(folder / "cpu", num_blocks=NUM_BLOCKS, num_threads=1)
    for got, want in zip(runner.score(rows), other.score(rows), strict=True):
        assert_close(got.log_probs, want.log_probs)
        np.testing.assert_array_equal(got.best_ids, want.best_ids)
    other.close()


def test_a_pool_is_sized_from_what_is_free(engine: EngineDir) -> None:
    seen: list[int] = []
    runner = OnnxRuntimeCudaRunner(
        engine, num_blocks=lambda free: seen.append(free) or 5, device="cpu"
    )
    assert (runner.num_blocks, seen[0] > 1 << 20) == (5, True)
    assert next(iter(pools(runner).values())).shape()[0] == 6
    runner.close()
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.forward(DECODE)


def test_pools_that_do_not_fit_name_the_setting(
    engine: EngineDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="num_blocks must be at least 1, not 0"):
        OnnxRuntimeCudaRunner(engine, num_blocks=0, device="cpu")
    with pytest.raises(ConfigError, match="KV blocks need .* bytes on cpu, .* lower kv_cache_num"):
        OnnxRuntimeCudaRunner(engine, num_blocks=1 << 40, device="cpu")
    monkeypatch.setattr(ort_cuda, "free_memory", lambda device: 0)  # it cannot be told
    spec = KVCacheSpec(num_layers=1, width=1 << 20, block_size=1024)
    with pytest.raises(ConfigError, match="memory does not suffice for .* KV blocks"):
        ort_cuda.allocate_pools(spec, 1 << 24, "cpu")


def test_memory_that_runs_out_in_a_step_is_said_so(
    runner: OnnxRuntimeCudaRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any) -> None:
        raise RuntimeError("BFCArena::AllocateRawInternal Failed to allocate memory for requested")

    monkeypatch.setattr(runner._model, "_forward", run)
    with pytest.raises(ConfigError, match="a step of 3 tokens: lower .*max_tokens_per_step"):
        runner.run(DECODE)


def test_a_wheel_without_the_provider_says_what_to_install(engine: EngineDir) -> None:
    """This environment's own wheel has none."""
    assert "CUDAExecutionProvider" not in ort.get_available_providers()
    with pytest.raises(EngineMismatchError, match="make setup-onnxruntime-gpu.*PROVIDER=cpu"):
        OnnxRuntimeCudaRunner(engine, num_blocks=1)
    with pytest.raises(
        ConfigError, match=r"\(onnxruntime\) has no CUDAExecutionProvider: run `make"
    ):
        ort_cuda.check_provider()


def test_two_wheels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_cuda, "_installed", lambda name: True)
    with pytest.raises(ConfigError, match="both installed and overwrite each other's files; run"):
        ort_cuda.check_provider()


def fake_wheel(monkeypatch: pytest.MonkeyPatch, printed: str) -> None:
    """Let the wheel here claim the provider, as one does on a machine without a GPU."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    preload = lambda **_: sys.stdout.write(printed)  # noqa: E731
    monkeypatch.setattr(ort, "preload_dlls", preload, raising=False)


def test_missing_libraries_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_wheel(monkeypatch, "Failed to load libcublas.so.13: no such file")
    with pytest.raises(ConfigError, match="libcublas.so.13: no such file: run `make setup-onnx"):
        ort_cuda.check_provider()
    assert capsys.readouterr().out == ""


def test_a_machine_without_a_gpu_is_told_so(
    engine: EngineDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_wheel(monkeypatch, "")
    monkeypatch.setattr(ort, "__version__", ONNXRUNTIME_GPU)
    monkeypatch.setattr(ort_cuda, "_DRIVER", "libcuda.so.none")
    with pytest.raises(ConfigError, match="no NVIDIA driver: libcuda.so.none.*PROVIDER=cpu"):
        OnnxRuntimeCudaRunner(engine, num_blocks=1)
    monkeypatch.setattr(ort_cuda, "_DRIVER", None)  # the process itself
    # The provider that cannot be made is left out, or an error is raised; either is one answer.
    fallen_back = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(ort, "InferenceSession", lambda *_, **__: fallen_back)
    with pytest.raises(ConfigError, match="cannot be used .*check nvidia-smi.*PROVIDER=cpu"):
        OnnxRuntimeCudaRunner(engine, num_blocks=1)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA failure 100: no CUDA-capable device is detected")

    monkeypatch.setattr(ort, "InferenceSession", fail)
    with pytest.raises(ConfigError, match="no CUDA-capable device .*check nvidia-smi"):
        OnnxRuntimeCudaRunner(engine, num_blocks=1)


def test_a_runner_refuses_the_other_providers_engine(folder: Path, engine: EngineDir) -> None:
    with pytest.raises(EngineMismatchError, match="built for PROVIDER=cuda, not for the CPU"):
        OnnxRuntimeRunner(engine, num_blocks=1)
    with pytest.raises(EngineMismatchError, match="'cpu', not for PROVIDER=cuda"):
        OnnxRuntimeCudaRunner.load(folder / "cpu", num_blocks=1, device="cpu")


def test_the_server_opens_the_provider_that_the_manifest_names(folder: Path) -> None:
    with pytest.raises(EngineMismatchError, match=re.escape("run `make setup-onnxruntime-gpu`")):
        open_engine(EngineConfig(engine_dir=str(folder / "cuda")))


def test_sizes_are_rounded_up_to_few() -> None:
    assert [rounded(n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 25, 64, 65)] == [
        *(1, 2, 3, 4, 6, 6, 8, 12, 16, 24, 32, 64, 96)
    ]
