from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from deepseek_triton.build.engine_dir import EngineDir, load_engine_dir
from deepseek_triton.build.limits import CallLimits
from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.errors import ConfigError, EngineMismatchError
from deepseek_triton.request import RequestKey, SamplingParams
from deepseek_triton.runner.base import RowSampling, StepRow
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
from deepseek_triton.runner.tensorrt import TensorRTRunner
from tests.unit.runner.fake_tensorrt import FakeDevice, fake_tensorrt

NUM_BLOCKS = 24
LIMITS = CallLimits(max_batch_size=4, max_prefill_rows=2, max_chunk_len=16, max_context_len=160)
NO_TOKENS = np.zeros(0, np.int32)
GREEDY = RowSampling(SamplingParams(), 0.0, None, NO_TOKENS, NO_TOKENS)
PROMPTS = [np.random.default_rng(i).integers(3, 4000, n) for i, n in enumerate((5, 37, 20, 12, 9))]
TABLES = [[3], [11, 0, 7], [2, 9], [5], [20]]


@pytest.fixture(scope="module", autouse=True)
def tensorrt() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt", fake_tensorrt())
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tensorrt: None) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    write_random_checkpoint(folder / "checkpoint", preset_config("v3"))
    build_engine(folder / "checkpoint", folder / "tensorrt", target="tensorrt", limits=LIMITS)
    build_engine(folder / "checkpoint", folder / "onnxruntime")
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> EngineDir:
    return load_engine_dir(folder / "tensorrt")


@pytest.fixture(scope="module")
def expected(folder: Path) -> NDArray[np.float32]:
    """Logits of each prompt, by ONNX Runtime's own form of the model."""
    runner = OnnxRuntimeRunner.load(folder / "onnxruntime", num_blocks=NUM_BLOCKS, num_threads=1)
    logits = [runner.forward([row(i)])[1][0].copy() for i in range(len(PROMPTS))]
    runner.close()
    return np.stack(logits)


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def runner(engine: EngineDir, device: FakeDevice) -> Iterator[TensorRTRunner]:
    runner = TensorRTRunner(engine, num_blocks=NUM_BLOCKS, device=device)
    yield runner
    runner.close()


def row(
    index: int, begin: int = 0, end: int | None = None, sampling: RowSampling | None = GREEDY
) -> StepRow:
    ids = PROMPTS[index][begin:end].astype(np.int32)
    return StepRow(RequestKey(str(index)), ids, begin, np.array(TABLES[index], np.int32), sampling)


def check(
    runner: TensorRTRunner, rows: list[StepRow], expected: NDArray[np.float32]
) -> NDArray[np.float32]:
    order, logits = runner.forward(rows)
    wanted = [i for i, one in enumerate(rows) if one.sampling is not None]
    assert sorted(order) == wanted
    for index, found in zip(order, logits, strict=True):
        prompt = int(rows[index].request_key)
        np.testing.assert_allclose(found, expected[prompt], atol=2e-4)
    return logits


def test_prompts_longer_than_a_chunk_and_short_ones_share_a_step(
    runner: TensorRTRunner, device: FakeDevice, expected: NDArray[np.float32]
) -> None:
    check(runner, [row(i) for i in range(len(PROMPTS))], expected)
    shapes = [line for line in device.log if line.startswith("execute")]
    assert "execute 0 (2, 16)" in shapes
    assert all(line.startswith("execute 0") for line in shapes)


def test_decoding_after_prefill_goes_through_the_pools(
    runner: TensorRTRunner, device: FakeDevice, expected: NDArray[np.float32]
) -> None:
    runner.forward([row(i, 0, -1, None) for i in range(3)])
    check(runner, [row(i, len(PROMPTS[i]) - 1) for i in range(3)], expected)
    assert device.log[-3:] == ["execute 1 (4, 1)", "write_rows", "record"]


def test_a_step_mixes_prefill_and_decode(
    runner: TensorRTRunner, expected: NDArray[np.float32]
) -> None:
    runner.forward([row(0, 0, 4, None), row(1, 0, 30, None)])
    check(runner, [row(2), row(0, 4), row(1, 30), row(3, 0, 6, None)], expected)


def test_more_rows_than_the_largest_batch_run_in_several_calls(
    runner: TensorRTRunner, device: FakeDevice, expected: NDArray[np.float32]
) -> None:
    runner.forward([row(i, 0, -1, None) for i in range(5)])
    device.log.clear()
    check(runner, [row(i, len(PROMPTS[i]) - 1) for i in range(5)], expected)
    shapes = [line for line in device.log if line.startswith("execute")]
    assert shapes == ["execute 1 (4, 1)", "execute 1 (1, 1)"]


def test_a_decode_shape_is_recorded_once_and_replayed_with_new_inputs(
    runner: TensorRTRunner, device: FakeDevice, expected: NDArray[np.float32]
) -> None:
    runner.forward([row(1, 0, 32, None), row(2, 0, 17, None)])
    device.log.clear()
    for step in range(2):
        runner.forward([row(2, 17 + step, 18 + step, None)])
        runner.forward([row(1, 32 + step, 33 + step, None)])
    check(runner, [row(2, 19)], expected)
    assert device.log.count("record") == 2  # tables of 2 and of 4 blocks
    assert device.log.count("launch") == 3
    runner.forward([row(1, 34, 36, None)])  # another context runs in between
    check(runner, [row(1, 36)], expected)
    assert (device.log.count("record"), device.log.count("launch")) == (2, 4)


def test_without_graphs_nothing_is_recorded(
    engine: EngineDir, device: FakeDevice, expected: NDArray[np.float32]
) -> None:
    runner = TensorRTRunner(engine, num_blocks=NUM_BLOCKS, device=device, use_graphs=False)
    runner.forward([row(0, 0, 3, None)])
    runner.forward([row(0, 3, 4, None)])
    check(runner, [row(0, 4)], expected)
    assert "record" not in device.log
    runner.close()


def test_what_a_block_held_before_does_not_reach_its_next_owner(
    runner: TensorRTRunner, device: FakeDevice, expected: NDArray[np.float32]
) -> None:
    spec = runner.kv_cache_spec
    shape = (NUM_BLOCKS, spec.block_size, spec.width)  # without the one that pads tables
    for pool in device.view(runner._pool_addresses, (spec.num_layers,), np.uint64):
        device.view(int(pool), shape, np.float32)[...] = np.nan
    runner.forward([row(1, 0, 33, None)])
    for end in range(34, 37):
        runner.forward([row(1, end - 1, end, None)])
    check(runner, [row(1, 36)], expected)


def test_tokens_are_sampled_and_rows_that_ask_for_none_hold_none(
    runner: TensorRTRunner, expected: NDArray[np.float32]
) -> None:
    result = runner.run((row(0, sampling=None), row(1)))
    assert result.token_ids.tolist() == [-1, int(expected[1].argmax())]


def test_the_pool_is_sized_by_what_is_free_once_the_engine_is_loaded(engine: EngineDir) -> None:
    seen = []

    def half(free: int) -> int:
        seen.append(free)
        return 7

    runner = TensorRTRunner(engine, num_blocks=half, device=FakeDevice(memory=1 << 28))
    assert runner.num_blocks == 7
    assert 0 < seen[0] < 1 << 28
    runner.close()
    with pytest.raises(ConfigError, match="num_blocks"):
        TensorRTRunner(engine, num_blocks=0, device=FakeDevice())


def test_an_engine_that_tensorrt_refuses_is_named_with_its_versions(
    engine: EngineDir, tmp_path: Path
) -> None:
    (tmp_path / "model.engine").write_bytes(b"other version")
    with pytest.raises(EngineMismatchError, match=r"built with tensorrt 10.14.1; .* refuses it"):
        TensorRTRunner(
            EngineDir(tmp_path, engine.manifest), num_blocks=NUM_BLOCKS, device=FakeDevice()
        )


def test_an_engine_of_another_target_is_refused(folder: Path) -> None:
    with pytest.raises(EngineMismatchError, match="built for 'onnxruntime'"):
        TensorRTRunner(load_engine_dir(folder / "onnxruntime"), num_blocks=4, device=FakeDevice())


def test_closing_frees_the_device_once(engine: EngineDir) -> None:
    device = FakeDevice()
    runner = TensorRTRunner(engine, num_blocks=4, device=device)
    runner.close()
    runner.close()
    assert device.closed
    with pytest.raises(RuntimeError, match="closed"):
        runner.forward([row(0)])
