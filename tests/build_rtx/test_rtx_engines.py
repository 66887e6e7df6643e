"""Real TensorRT-RTX engines of small models. Building needs no GPU; nothing here runs one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from deepseek_triton.build.engine_dir import load_engine_dir
from deepseek_triton.build.graph_report import REPORT_FILE
from deepseek_triton.build.limits import CallLimits
from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.build.tensorrt import TENSORRT_RTX, compile_engine
from deepseek_triton.build.trt_builder import Profile, TensorRTBuild
from deepseek_triton.build.trt_graph import build
from deepseek_triton.build.trt_sidecar import SIDECAR_FILE
from deepseek_triton.calibrate.quantize import QuantizeOptions, quantize_checkpoint
from deepseek_triton.checkpoint.presets import PRESETS, preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.errors import BuildError, ConfigError
from deepseek_triton.export.functions import DOMAIN, function_library

trt = pytest.importorskip("tensorrt_rtx", reason="pip install 'deepseek-triton[tensorrt-rtx]'")

SCRIPT = Path(__file__).parents[2] / "build_scripts" / "build_engine.py"
SMALL = {"num_hidden_layers": 2}
HALF = onnx.TensorProto.FLOAT16


def limits(*names: str) -> CallLimits:
    return CallLimits(
        max_batch_size=8,
        max_prefill_rows=2,
        max_chunk_len=64,
        max_context_len=512,
        compute_capabilities=names,
    )


@pytest.mark.parametrize(
    ("preset", "precision", "sm"),
    [
        *((preset, "bf16", ("89",)) for preset in PRESETS),
        ("v2", "fp16", ("80",)),
        ("v3", "fp32", ("120",)),
        ("v3", "fp16", ("80", "89", "120")),
    ],
    ids=str,
)
def test_a_model_of_each_family_builds(
    tmp_path: Path, preset: str, precision: str, sm: tuple[str, ...]
) -> None:
    write_random_checkpoint(tmp_path / "checkpoint", preset_config(preset) | SMALL)
    manifest = build_engine(
        tmp_path / "checkpoint",
        tmp_path / "engine",
        target="tensorrt_rtx",
        precision=precision,
        limits=limits(*sm),
    )
    assert manifest.versions["tensorrt-rtx"] == trt.__version__
    assert load_engine_dir(tmp_path / "engine").manifest == manifest
    description = json.loads((tmp_path / "engine" / SIDECAR_FILE).read_text())
    kind = {"fp16": "half", "bf16": "bf16", "fp32": "float"}[precision]
    types = {tensor["name"]: tensor["dtype"] for tensor in description["outputs"]}
    assert types.pop("logits") == types.pop("squared_norms") == "float"
    assert set(types.values()) == {kind}
    assert description["inputs"][0] == {"name": "input_ids", "dtype": "int32", "shape": [-1, -1]}
    weights = (tmp_path / "checkpoint" / "model.safetensors").stat().st_size
    assert (
        description["engine_bytes"] > weights * {"fp32": 1.0, "fp16": 0.5, "bf16": 0.5}[precision]
    )


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_quantised_checkpoint_builds(tmp_path: Path, symmetric: bool) -> None:
    config = preset_config("v3") | SMALL | {"moe_intermediate_size": 64}
    write_random_checkpoint(tmp_path / "checkpoint", config)
    options = QuantizeOptions(method="rtn", group_size=64, symmetric=symmetric)
    quantize_checkpoint(tmp_path / "checkpoint", tmp_path / "int4", options, [])
    build_engine(
        tmp_path / "int4",
        tmp_path / "engine",
        target="tensorrt_rtx",
        precision="bf16",
        limits=limits("89"),
    )
    report = json.loads((tmp_path / "engine" / REPORT_FILE).read_text())
    assert report["calls"]["ExpertsInt4"] == 1 and report["calls"]["LinearInt4"] > 4
    # Every INT4 product of the portable model is one here, and experts are two.
    dequantized = report["calls"]["LinearInt4"] + 2 * report["calls"]["ExpertsInt4"]
    assert report["built"]["DequantizeLinear"] == dequantized


# Width and depth of the INT4 layers below: 8 and 12 million weights.
D, F, EXPERTS, BLOCK = 1024, 1024, 4, 128


def int4_tensors(name: str, *shape: int) -> list[onnx.TensorProto]:
    rng = np.random.default_rng(0)
    blocks = (*shape[:-1], shape[-1] // BLOCK)

    def codes(label: str, sizes: tuple[int, ...]) -> onnx.TensorProto:
        raw = rng.integers(0, 256, int(np.prod(sizes)) // 2, dtype=np.uint8).tobytes()
        return helper.make_tensor(f"{name}.{label}", onnx.TensorProto.UINT4, sizes, raw, raw=True)

    scales = numpy_helper.from_array(rng.random(blocks).astype(np.float16), f"{name}.scales")
    return [codes("codes", shape), scales, codes("zero_points", blocks)]


def int4_model(folder: Path, kind: str, symmetric: bool) -> tuple[Path, int]:
    """A portable model of one INT4 call; also the number of its INT4 weights."""
    attributes = {"group_size": BLOCK, "symmetric": int(symmetric)}
    inputs = [helper.make_tensor_value_info("x", HALF, ["T", D])]
    if kind == "linear":
        tensors = int4_tensors("w", 8 * D, D)
        attributes_of_kind: dict[str, list[int]] = {}
    else:
        tensors = [*int4_tensors("a", EXPERTS, 2 * F, D), *int4_tensors("b", EXPERTS, D, F)]
        inputs += [
            helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["T", 2]),
            helper.make_tensor_value_info("weights", onnx.TensorProto.FLOAT, ["T", 2]),
        ]
        attributes_of_kind = {"num_experts": [EXPERTS], "top_k": [2]}
    call = helper.make_node(
        "LinearInt4" if kind == "linear" else "ExpertsInt4",
        [*(value.name for value in inputs), *(tensor.name for tensor in tensors)],
        ["logits"],
        name=kind,
        domain=DOMAIN,
        **attributes,
        **attributes_of_kind,
    )
    output = helper.make_tensor_value_info("logits", HALF, ["T", 8 * D if kind == "linear" else D])
    graph = helper.make_graph([call], kind, inputs, [output], tensors)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    model.functions.extend(function_library().values())
    path = folder / "model.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="weights.bin")
    count = sum(int(np.prod(t.dims)) for t in tensors if t.name.endswith(".codes"))
    return path, count


@pytest.mark.parametrize("kind", ["linear", "experts"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_weights_stay_four_bits_in_the_engine(
    tmp_path: Path, kind: str, symmetric: bool
) -> None:
    path, count = int4_model(tmp_path, kind, symmetric)
    build(path)
    work = TensorRTBuild(trt, path)
    work.set_compute_capabilities(["89"])
    names = {
        work.network.get_input(i).name: work.network.get_input(i).shape[1]
        for i in range(work.network.num_inputs)
    }
    for most in (64, 8):
        shapes = {name: ((1, width), (8, width), (most, width)) for name, width in names.items()}
        work.add_profile(Profile("any", shapes))
    work.compile(tmp_path / "model.engine", threading.Event())
    size = (tmp_path / "model.engine").stat().st_size
    scales = 2 * count / BLOCK * (1 if symmetric else 2)
    assert count / 2 < size < count / 2 + scales + 2e6 < count


def test_tensorrts_own_words_and_the_node_reach_the_user(tmp_path: Path) -> None:
    """TensorRT's TopK takes at most 3840 elements."""
    k = numpy_helper.from_array(np.array([4000]), "k")
    node = helper.make_node("TopK", ["x", "k"], ["v", "y"], name="layers.1.mlp/choose")
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["T", 8192])
    y = helper.make_tensor_value_info("v", onnx.TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "wide", [x], [y], [k])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save_model(model, tmp_path / "model.onnx")
    work = TensorRTBuild(trt, tmp_path / "model.onnx")
    work.set_compute_capabilities(["80"])
    work.add_profile(Profile("any", {"x": ((1, 8192), (2, 8192), (4, 8192))}))
    with pytest.raises(BuildError, match=r"layers.1.mlp/choose: K exceeds .*3840"):
        work.compile(tmp_path / "model.engine", threading.Event())
    assert not (tmp_path / "model.engine").exists()
    node.op_type = "NoSuchOperator"
    graph.node[0].CopyFrom(node)
    model.graph.CopyFrom(graph)
    onnx.save_model(model, tmp_path / "model.onnx")
    with pytest.raises(BuildError, match=r"node 'layers.1.mlp/choose' \(NoSuchOperator\)"):
        TensorRTBuild(trt, tmp_path / "model.onnx")


def test_an_unknown_compute_capability_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    path, _ = int4_model(tmp_path, "linear", True)
    build(path)
    with pytest.raises(ConfigError, match="SM: '90' is unknown; choose from 75, 80, 86, 89, 120"):
        TensorRTBuild(trt, path).set_compute_capabilities(["90"])
    with pytest.raises(ConfigError, match="TIMING_CACHE"):
        compile_engine(TENSORRT_RTX, path, limits("89"), tmp_path / "timing.cache")


def test_ctrl_c_ends_a_real_build_and_leaves_nothing(tmp_path: Path) -> None:
    config = preset_config("v3") | {"num_hidden_layers": 24}
    write_random_checkpoint(tmp_path / "checkpoint", config)
    command = [
        *(sys.executable, SCRIPT, "--checkpoint", tmp_path / "checkpoint"),
        *("--engine", tmp_path / "engines" / "engine", "--target", "tensorrt_rtx", "--sm", "89"),
    ]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("INFO: graph")  # TensorRT is next
        time.sleep(2)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted; nothing was changed" in errors and "Traceback" not in errors
    assert list((tmp_path / "engines").iterdir()) == []
