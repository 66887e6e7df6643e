from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deepseek_triton.build import trt_builder
from deepseek_triton.build.engine_dir import load_engine_dir
from deepseek_triton.build.graph_report import REPORT_FILE
from deepseek_triton.build.limits import DEFAULT_CONTEXT_LEN, CallLimits
from deepseek_triton.build.pipeline import build_engine, is_current
from deepseek_triton.build.targets import find_target
from deepseek_triton.build.trt_sidecar import SIDECAR_FILE
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.errors import BuildError, ConfigError
from tests.unit.runner import fake_tensorrt as fake

LIMITS = CallLimits(max_batch_size=8, max_prefill_rows=2, max_chunk_len=64, max_context_len=500)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    return write_random_checkpoint(folder / "checkpoint", preset_config("v2-lite"))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`tensorrt` is the fake, with a builder of its own that a test may change."""
    module = fake.fake_tensorrt()
    vars(module)["Builder"] = type("Builder", (fake._Builder,), {})
    vars(module)["OnnxParser"] = type("OnnxParser", (fake._Parser,), {})
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    yield module


def build(checkpoint: Path, engine: Path, **arguments: Any) -> Any:
    return build_engine(checkpoint, engine, target="tensorrt", **{"limits": LIMITS, **arguments})


def test_the_engine_directory_holds_the_engine_and_no_model(
    checkpoint: Path, tmp_path: Path, module: ModuleType
) -> None:
    manifest = build(checkpoint, tmp_path / "engine")
    names = {entry.name for entry in manifest.files}
    assert {"model.engine", SIDECAR_FILE, REPORT_FILE} < names
    assert not {name for name in names if name.endswith((".onnx", ".bin"))}
    assert manifest.model_file == "model.engine"
    assert (manifest.limits, manifest.max_context_len) == (LIMITS, 500)
    assert manifest.versions["tensorrt"] == "10.14.1"
    assert load_engine_dir(tmp_path / "engine").manifest == manifest


def test_two_profiles_cover_what_the_limits_say(
    checkpoint: Path, tmp_path: Path, module: ModuleType
) -> None:
    build(checkpoint, tmp_path / "engine")
    description = json.loads((tmp_path / "engine" / SIDECAR_FILE).read_text())
    assert list(description["profiles"]) == ["prefill", "decode"]
    prefill, decode = description["profiles"].values()
    assert prefill["input_ids"] == {"min": [1, 1], "opt": [2, 64], "max": [2, 64]}
    assert decode["input_ids"] == {"min": [1, 1], "opt": [8, 1], "max": [8, 1]}
    assert prefill["block_tables"] == {"min": [1, 1], "opt": [2, 8], "max": [2, 32]}
    assert decode["context_lens"] == {"min": [1], "opt": [8], "max": [8]}
    pool = decode["kv_pool.3"]
    assert pool["min"] == [1, 16, 80]
    blocks = pool["max"][0]
    assert blocks * 16 * 80 < 2**31 <= (blocks + 1) * 16 * 80
    assert {"name": "logits", "dtype": "float32", "shape": [-1, 4096]} in description["outputs"]
    assert description["limits"] == {**dataclasses.asdict(LIMITS), "compute_capabilities": []}
    assert sum(description["layer_counts"].values()) == len(description["layers"])
    assert any("layers.3.attention/cached_scores" in layer for layer in description["layers"])


def test_an_engine_of_other_limits_or_version_is_not_current(
    checkpoint: Path, tmp_path: Path, module: ModuleType
) -> None:
    build(checkpoint, tmp_path / "engine")

    def current(limits: CallLimits | None) -> bool:
        return is_current(tmp_path / "engine", checkpoint, target="tensorrt", limits=limits)

    assert current(LIMITS)
    assert not current(dataclasses.replace(LIMITS, max_batch_size=16))
    assert not current(None)
    vars(module)["__version__"] = "10.15.0"
    assert not current(LIMITS)


def test_limits_have_a_context_that_the_model_has() -> None:
    assert CallLimits().resolved(163840).max_context_len == DEFAULT_CONTEXT_LEN
    assert CallLimits().resolved(4096).max_context_len == 4096
    with pytest.raises(ConfigError, match="MAX_CONTEXT: 5000 is more than the model's 4096"):
        CallLimits(max_context_len=5000).resolved(4096)
    with pytest.raises(ConfigError, match="MAX_BATCH: 0"):
        CallLimits(max_batch_size=0)


def test_a_target_whose_module_is_missing_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ConfigError, match=r"'tensorrt'.*nvidia/tensorrt"):
        find_target("tensorrt", "fp16")
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[tensorrt-rtx\]'"):
        find_target("tensorrt_rtx", "fp16")
    monkeypatch.setitem(sys.modules, "tensorrt", ModuleType("tensorrt"))  # a stub package
    with pytest.raises(ConfigError, match="has no builder; use an NVIDIA container"):
        find_target("tensorrt", "fp16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limits": CallLimits(compute_capabilities=("89",))}, "SM: .* GPU of this machine"),
        ({"precision": "int8"}, "PRECISION: 'int8' is not available for tensorrt"),
        ({"draft": True}, "DRAFT: tensorrt"),
        ({"target": "onnxruntime"}, "onnxruntime engines have no fixed sizes"),
        ({"target": "onnxruntime", "limits": None, "timing_cache": Path("x")}, "TIMING_CACHE"),
        (
            {"target": "tensorrt_rtx", "timing_cache": Path("x")},
            "TIMING_CACHE: TensorRT-RTX has none",
        ),
    ],
)
def test_options_that_a_target_does_not_have_are_refused(
    checkpoint: Path,
    tmp_path: Path,
    module: ModuleType,
    arguments: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_engine(
            checkpoint,
            tmp_path / "engine",
            **{"target": "tensorrt", "limits": LIMITS, **arguments},
        )
    assert list(tmp_path.iterdir()) == []


class _Cache:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self) -> bytes:
        return self.data + b"+"


def test_a_timing_cache_is_read_and_written_back(
    checkpoint: Path, tmp_path: Path, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[_Cache] = []
    config = fake._Config
    monkeypatch.setattr(config, "create_timing_cache", lambda _, data: _Cache(data), raising=False)
    monkeypatch.setattr(
        config, "set_timing_cache", lambda _, cache, ignore: not seen.append(cache), raising=False
    )
    monkeypatch.setattr(config, "get_timing_cache", lambda _: seen[-1], raising=False)
    for _ in range(2):
        build(checkpoint, tmp_path / "engine", timing_cache=tmp_path / "timing.cache")
    assert [cache.data for cache in seen] == [b"", b"+"]
    assert (tmp_path / "timing.cache").read_bytes() == b"++"


class _ParserError:
    def node_operator(self) -> str:
        return "TopK"

    def node_name(self) -> str:
        return "layers.1.mlp/choose"

    def desc(self) -> str:
        return "K is too large\n"


def test_a_model_that_cannot_be_parsed_is_reported_with_its_node(
    checkpoint: Path, tmp_path: Path, module: ModuleType
) -> None:
    parser = module.OnnxParser
    parser.parse_from_file = lambda self, path: False
    parser.num_errors, parser.get_error = 1, lambda self, index: _ParserError()
    message = r"cannot parse the model; node 'layers.1.mlp/choose' \(TopK\): K is too large$"
    with pytest.raises(BuildError, match=message):
        build(checkpoint, tmp_path / "engine")
    assert list(tmp_path.iterdir()) == []


def test_messages_of_the_error_recorder_are_in_the_error(
    checkpoint: Path, tmp_path: Path, module: ModuleType
) -> None:
    def fail(self: Any, network: Any, config: Any, writer: Any) -> bool:
        for text in ("layers.2.o: no kernel", "layers.2.o: no kernel", "giving up"):
            self.error_recorder.report_error(2, text)
        assert self.error_recorder.num_errors() == 3
        return False

    module.Builder.build_serialized_network_to_stream = fail
    with pytest.raises(BuildError, match="build the model; layers.2.o: no kernel; giving up$"):
        build(checkpoint, tmp_path / "engine")
    assert list(tmp_path.iterdir()) == []


def test_a_build_without_streams_writes_the_same_engine(
    checkpoint: Path, tmp_path: Path, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(checkpoint, tmp_path / "streamed")
    to_stream = fake._Builder.build_serialized_network_to_stream
    plans: list[bytes] = []

    class Sink:
        @staticmethod
        def write(data: bytes) -> int:
            plans.append(data)
            return len(data)

    class Plan(bytearray):
        @property
        def nbytes(self) -> int:
            return len(self)

    def whole(self: Any, network: Any, config: Any) -> Plan:
        to_stream(self, network, config, Sink)
        return Plan(plans[-1])

    monkeypatch.delattr(fake._Builder, "build_serialized_network_to_stream")
    module.Builder.build_serialized_network = whole
    build(checkpoint, tmp_path / "whole")
    streamed, at_once = (
        (tmp_path / name / "model.engine").read_bytes() for name in ("streamed", "whole")
    )
    assert streamed == at_once == plans[0]


def test_a_full_disk_is_reported_and_leaves_the_old_engine(
    checkpoint: Path, tmp_path: Path, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build(checkpoint, tmp_path / "engine")
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    make = trt_builder._make_writer
    with full.open("wb", buffering=0) as file:
        monkeypatch.setattr(trt_builder, "_make_writer", lambda trt, write: make(trt, file.write))
        with pytest.raises(BuildError, match="the disk is full"):
            build(checkpoint, tmp_path / "engine")
    assert load_engine_dir(tmp_path / "engine").manifest == before
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_ctrl_c_ends_the_build_at_its_next_step_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[bool] = []

    def long_build(self: Any, network: Any, config: Any, writer: Any) -> bool:
        writer.write(b"half an engine")
        for step in range(1000):
            time.sleep(0.01)
            steps.append(config.progress_monitor.step_complete("all", step))
            if not steps[-1]:
                return False
        return True

    module.Builder.build_serialized_network_to_stream = long_build
    wait, presses = trt_builder.wait, iter([KeyboardInterrupt, KeyboardInterrupt])

    def press(futures: Any, timeout: float) -> None:
        if error := next(presses, None):
            raise error
        wait(futures, timeout)

    monkeypatch.setattr(trt_builder, "wait", press)
    with pytest.raises(KeyboardInterrupt):
        build(checkpoint, tmp_path / "engine")
    assert steps[-1] is False and len(steps) < 100
    assert list(tmp_path.iterdir()) == []
