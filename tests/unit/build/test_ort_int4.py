from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper
from safetensors.numpy import load_file, save_file

from deepseek_triton.build.engine_dir import EngineDir, load_engine_dir
from deepseek_triton.build.pipeline import build_engine, is_current
from deepseek_triton.build.stored_weights import EXTRA_FILE
from deepseek_triton.checkpoint.names import EMBEDDING
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.errors import ConfigError
from deepseek_triton.request import RequestKey, SamplingParams
from deepseek_triton.runner.base import RowSampling, StepRow
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
from tests.unit.quantize.stored import (
    AWQ_CONFIG,
    GPTQ_CONFIG,
    awq,
    gptq,
    pack_quantized,
    packed_config,
    write_int4_checkpoints,
)

NO_TOKENS = np.zeros(0, np.int32)
GREEDY = RowSampling(SamplingParams(), 0.0, None, NO_TOKENS, NO_TOKENS)
LENGTHS = (5, 37, 20, 16, 1, 33, 11)

V2, V3, QWEN2 = (preset_config(arch) | {"num_hidden_layers": 2} for arch in ("v2", "v3", "qwen2"))
WIDE = V3 | {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any, dict[str, Any]]] = {
    "zero points, groups of 32": (V2, AWQ_CONFIG, awq, {}),
    "symmetric, groups of 128": (
        WIDE | {"q_lora_rank": 128, "kv_lora_rank": 128},
        packed_config(group_size=128, symmetric=True),
        lambda source, layer: pack_quantized(source, layer, symmetric=True),
        {"group_size": 128, "symmetric": True},
    ),
    "zero points, groups of 64": (
        WIDE,
        packed_config(group_size=64),
        pack_quantized,
        {"group_size": 64},
    ),
    "input order": (QWEN2, GPTQ_CONFIG, gptq, {"order": True}),
    "partial groups": (
        QWEN2 | {"hidden_size": 120, "head_dim": 24, "intermediate_size": 200},
        packed_config(),
        pack_quantized,
        {},
    ),
}


def row(index: int, length: int, begin: int = 0) -> StepRow:
    ids = np.random.default_rng(index).integers(3, 4000, length).astype(np.int32)
    table = np.arange(3 * index, 3 * index + 3, dtype=np.int32)
    return StepRow(RequestKey(str(index)), ids[begin:], begin, table, GREEDY)


def forward(runner: OnnxRuntimeRunner, rows: list[StepRow]) -> NDArray[np.float32]:
    order, logits = runner.forward(rows)
    aligned = np.empty((len(rows), runner.vocab_size), np.float32)
    aligned[order] = logits
    return aligned


def open_runner(folder: Path, threads: int = 2) -> OnnxRuntimeRunner:
    return OnnxRuntimeRunner(load_engine_dir(folder), num_blocks=24, num_threads=threads)


@pytest.fixture(scope="module", params=CASES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the engines `dense` (of the dequantised weights), `level0` and `level4`."""
    folder = tmp_path_factory.mktemp("engines")
    config, quantization, encode, options = CASES[request.param]
    int4, dense = write_int4_checkpoints(folder, config, quantization, encode, **options)
    build_engine(dense, folder / "e-dense")
    for level in (0, 4):
        build_engine(int4, folder / f"e-{level}", int4_accuracy_level=level)
    return folder


@pytest.fixture(scope="module")
def expected(built: Path) -> Iterator[NDArray[np.float32]]:
    runner = open_runner(built / "e-dense")
    yield forward(runner, [row(i, n) for i, n in enumerate(LENGTHS)])
    runner.close()


def test_level_0_gives_the_logits_of_the_dequantised_weights(
    built: Path, expected: NDArray[np.float32]
) -> None:
    runner = open_runner(built / "e-0")
    found = forward(runner, [row(i, n) for i, n in enumerate(LENGTHS)])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    runner.close()


def test_level_4_is_near_them(built: Path, expected: NDArray[np.float32]) -> None:
    runner = open_runner(built / "e-4")
    found = forward(runner, [row(i, n) for i, n in enumerate(LENGTHS)])
    error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    assert 1e-4 < error < 0.06
    runner.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_at_level_4_company_does_not_change_a_bit(built: Path, threads: int) -> None:
    runner = open_runner(built / "e-4", threads)
    rows = [row(i, n) for i, n in enumerate(LENGTHS)]
    everyone = forward(runner, rows)
    alone = np.concatenate([forward(runner, [one]) for one in rows])
    np.testing.assert_array_equal(alone, everyone)
    decodes = [row(i, n, n - 1) for i, n in enumerate(LENGTHS)]
    np.testing.assert_array_equal(forward(runner, decodes), everyone)
    for count in range(1, len(decodes)):
        np.testing.assert_array_equal(forward(runner, decodes[:count]), everyone[:count])
    runner.close()


@pytest.mark.parametrize("value", [1e25, np.inf, np.nan])
def test_a_row_that_is_not_finite_is_refused_and_its_partners_keep_their_bits(
    tmp_path: Path, value: float
) -> None:
    """Kernels take rows two at a time, in the experts too: it is between them."""
    options = packed_config(group_size=64), pack_quantized
    int4, _ = write_int4_checkpoints(tmp_path, WIDE, *options, group_size=64)
    loud = row(1, 3)
    (file,) = [f for f in int4.glob("*.safetensors") if EMBEDDING in load_file(f)]
    tensors = load_file(file)
    tensors[EMBEDDING][loud.token_ids[-1]] = value
    save_file(tensors, file)
    build_engine(int4, tmp_path / "e")
    assert "QMoE" in operators(tmp_path / "e")
    runner = open_runner(tmp_path / "e")
    quiet = [row(0, 4), row(2, 5)]
    alone = np.concatenate([forward(runner, [one]) for one in quiet])
    together = forward(runner, [quiet[0], loud, quiet[1]])
    np.testing.assert_array_equal(together[[0, 2]], alone)
    result = runner.run((quiet[0], loud, quiet[1]))
    assert (result.token_ids < 0).tolist() == [False, True, False]
    runner.close()


def operators(engine: Path) -> set[str]:
    model = onnx.load(engine / "model.onnx", load_external_data=False)
    return {node.op_type for node in model.graph.node}


def test_no_weight_is_dequantised_in_the_graph(built: Path) -> None:
    for level in (0, 4):
        assert "MatMulNBits" in operators(built / f"e-{level}")
        assert "DequantizeLinear" not in operators(built / f"e-{level}")


def manifest_level(engine: Path) -> int | None:
    engine_dir: EngineDir = load_engine_dir(engine, verify_contents=False)
    return engine_dir.manifest.int4_accuracy_level


def test_the_level_is_in_the_manifest_and_4_by_default(tmp_path: Path) -> None:
    int4, dense = write_int4_checkpoints(tmp_path, QWEN2, packed_config(), pack_quantized)
    build_engine(int4, tmp_path / "e")
    assert manifest_level(tmp_path / "e") == 4
    assert is_current(tmp_path / "e", int4)
    build_engine(int4, tmp_path / "e", int4_accuracy_level=0)
    assert manifest_level(tmp_path / "e") == 0
    assert not is_current(tmp_path / "e", int4)
    build_engine(dense, tmp_path / "e")
    assert manifest_level(tmp_path / "e") is None
    with pytest.raises(ConfigError, match="no level 1; choose 4 or 0"):
        build_engine(int4, tmp_path / "e", int4_accuracy_level=1)
    with pytest.raises(ConfigError, match="cuda has no level 4; leave it out"):
        build_engine(int4, tmp_path / "e", target="cuda", int4_accuracy_level=4)


def test_groups_without_a_kernel_are_computed_slowly_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = QWEN2 | {"hidden_size": 80, "head_dim": 20, "intermediate_size": 120}
    options = packed_config(group_size=40), pack_quantized
    int4, dense = write_int4_checkpoints(tmp_path, config, *options, group_size=40)
    with caplog.at_level(logging.WARNING):
        build_engine(int4, tmp_path / "e-int4", int4_accuracy_level=0)
    assert "no kernel for groups of 40: this is slow" in caplog.text
    build_engine(dense, tmp_path / "e-dense")
    logits = []
    for name in ("int4", "dense"):
        runner = open_runner(tmp_path / f"e-{name}")
        logits.append(forward(runner, [row(1, 9)]))
        runner.close()
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-5 * np.abs(logits[1]).max())


@pytest.mark.parametrize("level", [0, 4])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_scales_are_widened(tmp_path: Path, precision: str, level: int) -> None:
    int4, dense = write_int4_checkpoints(tmp_path, V2, AWQ_CONFIG, awq)
    build_engine(int4, tmp_path / "e", precision=precision, int4_accuracy_level=level)
    build_engine(dense, tmp_path / "e-dense")
    logits = []
    for name in ("e", "e-dense"):
        runner = open_runner(tmp_path / name)
        logits.append(forward(runner, [row(1, 9)]))
        runner.close()
    rounding = {"fp16": 2e-3, "bf16": 3e-2}[precision] + (3e-2 if level else 0)
    np.testing.assert_allclose(*logits, rtol=0, atol=rounding * np.abs(logits[1]).max())


def test_bytes_that_nothing_reads_any_more_are_cut_off(tmp_path: Path) -> None:
    int4, _ = write_int4_checkpoints(tmp_path, V2, AWQ_CONFIG, awq)
    for level in (0, 4):
        build_engine(int4, tmp_path / f"e-{level}", int4_accuracy_level=level)
    sizes = [(tmp_path / f"e-{level}" / "weights.bin").stat().st_size for level in (0, 4)]
    head = 4 * V2["vocab_size"] * V2["hidden_size"]
    assert sizes[0] - sizes[1] >= head
    extra = (tmp_path / "e-4" / EXTRA_FILE).stat().st_size
    assert extra < head / 2  # 8 bits, and a scale for each 64 or for each column, instead


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_heads_and_output_layer_have_eight_bits_at_level_4_alone(
    tmp_path: Path, precision: str
) -> None:
    int4, _ = write_int4_checkpoints(tmp_path, V2, AWQ_CONFIG, awq)
    projections = 2 * V2["num_hidden_layers"]
    for level, heads, by_head in ((4, 1, projections), (0, 0, 0)):
        build_engine(int4, tmp_path / "e", precision=precision, int4_accuracy_level=level)
        model = onnx.load(tmp_path / "e" / "model.onnx", load_external_data=False)
        nodes = model.graph.node
        bits = [
            helper.get_node_attr_value(node, "bits")
            for node in nodes
            if node.op_type == "MatMulNBits"
        ]
        assert bits.count(8) == heads and 4 in bits
        assert sum(node.op_type == "MatMulInteger" for node in nodes) == by_head
        left = [tensor.name for tensor in model.graph.initializer if ".w_u" in tensor.name]
        narrow = [name for name in left if name.endswith((".codes", ".scales"))]
        by_head_fp32 = projections * V2["num_attention_heads"]
        assert (len(left), len(narrow)) == ((2 * by_head,) * 2 if level else (by_head_fp32, 0))
