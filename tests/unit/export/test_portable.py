from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.checker
import onnx.inliner
import pytest

from deepseek_triton.checkpoint.spec import LatentAttentionSpec, ModelSpec, MoESpec, RoutingSpec
from deepseek_triton.errors import BuildError, CheckpointError, ConfigError
from deepseek_triton.export import portable, weights
from deepseek_triton.export.graph import GraphBuilder
from deepseek_triton.export.portable import WEIGHTS_FILE, export_portable, write_graph
from deepseek_triton.export.precision import Precision
from tests.unit.export.fakes import DictReader, tiny_spec


def export(spec: ModelSpec, out: Path, **options: Any) -> onnx.ModelProto:
    return onnx.load(export_portable(spec, DictReader(spec), out, **options))


def interface(values: Any) -> dict[str, tuple[int, list[int | str]]]:
    """Names, dtypes and shapes of a graph's inputs or outputs."""
    return {
        value.name: (
            value.type.tensor_type.elem_type,
            [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim],
        )
        for value in values
    }


def weight(model: onnx.ModelProto, name: str) -> np.ndarray:
    found = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    return onnx.numpy_helper.to_array(found)


def test_inputs_and_outputs_are_those_of_the_design(tmp_path: Path) -> None:
    model = export(tiny_spec(), tmp_path / "out", block_size=8)
    int32, real = onnx.TensorProto.INT32, onnx.TensorProto.FLOAT
    pool = (real, ["num_blocks", 8, 16])
    assert interface(model.graph.input) == {
        "input_ids": (int32, ["B", "S"]),
        "positions": (int32, ["B", "S"]),
        "context_lens": (int32, ["B"]),
        "block_tables": (int32, ["B", "M"]),
        "last_token": (int32, ["B"]),
        "kv_pool.0": pool,
        "kv_pool.1": pool,
    }
    assert interface(model.graph.output) == {
        "logits": (real, ["B", 40]),
        "squared_norms": (real, ["T", 1]),
        "new_kv.0": (real, ["B", "S", 16]),
        "new_kv.1": (real, ["B", "S", 16]),
    }
    assert model.ir_version <= 10
    assert {o.domain: o.version for o in model.opset_import} == {"": 21, "deepseek": 1}


def test_nodes_are_named_by_layer_and_part(tmp_path: Path) -> None:
    model = export(tiny_spec(), tmp_path / "out")
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)
    for part in ("attention", "attention.o", "mlp.experts", "mlp.shared.down", "output"):
        assert f"layers.1.{part}" in names
    values = {output for node in model.graph.node for output in node.output}
    assert {"layers.0.output", "layers.1.output"} <= values


def test_calls_carry_what_a_replacement_needs(tmp_path: Path) -> None:
    model = export(tiny_spec(), tmp_path / "out")
    calls = {node.op_type: node for node in model.graph.node if node.domain == "deepseek"}
    attributes = {
        a.name: onnx.helper.get_attribute_value(a) for a in calls["LatentAttention"].attribute
    }
    assert attributes == {
        "num_heads": [2],
        "qk_head_dims": [6, 4],
        "latent_dims": [12, 4],
        "v_head_dim": [5],
        "scale": pytest.approx(0.3),
        "epsilon": pytest.approx(1e-6),
        "rotary_interleaved": [1],
    }
    experts = {a.name: list(a.ints) for a in calls["Experts"].attribute}
    assert experts == {"num_experts": [4], "top_k": [2]}


def test_weights_are_merged_and_laid_out_for_the_kernels(tmp_path: Path) -> None:
    spec = tiny_spec()
    reader = DictReader(spec)
    model = onnx.load(export_portable(spec, reader, tmp_path / "out"))
    source = reader.arrays
    attention = "model.layers.0.self_attn."
    merged = [source[attention + f"{part}.weight"] for part in ("q_proj", "kv_a_proj_with_mqa")]
    np.testing.assert_array_equal(
        weight(model, "layers.0.attention.q_kv_a.weight"), np.concatenate(merged)
    )
    kv_b = source[attention + "kv_b_proj.weight"].reshape(2, 6 + 5, 12)
    np.testing.assert_array_equal(weight(model, "layers.0.attention.w_uk"), kv_b[:, :6])
    np.testing.assert_array_equal(
        weight(model, "layers.0.attention.w_uv"), kv_b[:, 6:].transpose(0, 2, 1)
    )
    gate_up = weight(model, "layers.1.mlp.experts.gate_up")
    expert = "model.layers.1.mlp.experts.3."
    np.testing.assert_array_equal(gate_up[3, 0::2], source[expert + "gate_proj.weight"])
    np.testing.assert_array_equal(gate_up[3, 1::2], source[expert + "up_proj.weight"])


def test_a_tied_embedding_is_stored_once(tmp_path: Path) -> None:
    model = export(tiny_spec(tie_word_embeddings=True), tmp_path / "out")
    names = [tensor.name for tensor in model.graph.initializer]
    assert "lm_head.weight" not in names
    head = next(node for node in model.graph.node if node.name == "logits")
    assert head.input[1] == "embedding.weight"


def routing(kind: Any, groups: int) -> ModelSpec:
    chosen = RoutingSpec(kind, 4, 2, groups, 1, 1.0, kind == "sigmoid")
    return tiny_spec(moe=MoESpec(chosen, 8, 16))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "spec", [routing("softmax", 2), routing("sigmoid", 1), routing("sigmoid", 2)]
)
def test_a_narrower_precision_has_every_cast_that_strong_typing_needs(
    tmp_path: Path, spec: ModelSpec, precision: str
) -> None:
    narrow = {
        "fp16": Precision("fp16", np.float16, onnx.TensorProto.FLOAT16),
        "bf16": Precision("bf16", ml_dtypes.bfloat16, onnx.TensorProto.BFLOAT16),
    }[precision]
    graph = GraphBuilder(narrow)
    write_graph(graph, spec, DictReader(spec, ml_dtypes.bfloat16), block_size=4)
    graph.weights.write(tmp_path / WEIGHTS_FILE, lambda: None)
    inlined = onnx.inliner.inline_local_functions(graph.model("narrow", WEIGHTS_FILE))
    onnx.save(inlined, tmp_path / "model.onnx")
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").touch()
    with pytest.raises(BuildError, match="exists already; remove it or choose another folder"):
        export(tiny_spec(), out)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "precious"]


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export(tiny_spec(), tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["model.onnx", WEIGHTS_FILE]


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="/file/out cannot be written: File exists: .*/file$"):
        export(tiny_spec(), tmp_path / "file" / "out")


def test_a_disk_known_to_be_too_small_is_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(BuildError, match=f"^{tmp_path}: 0.0 GB are to be written"):
        export(tiny_spec(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_while_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(weights, "_chunks", full)  # after the file was begun
    with pytest.raises(BuildError, match="No space left on device"):
        export(tiny_spec(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.mlp.experts.2.up_proj.weight"]
)
def test_a_missing_tensor_leaves_nothing(tmp_path: Path, name: str) -> None:
    spec = tiny_spec()
    reader = DictReader(spec)
    del reader.arrays[name]
    with pytest.raises(CheckpointError, match=name):
        export_portable(spec, reader, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_export_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(portable.onnx, "save_model", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(tiny_spec(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


TINY_BIASED = tiny_spec(
    attention=LatentAttentionSpec(2, 8, 12, 6, 4, 5, 0.3, bias=True),
    moe=MoESpec(RoutingSpec("sigmoid", 4, 2, 1, 1, 1.0, False), 8, 16),
)
IN_FLOAT32 = ("mlp.gate.weight", "e_score_correction_bias")


@pytest.mark.parametrize("name", DictReader(TINY_BIASED).arrays)
def test_a_weight_that_the_precision_cannot_hold_is_named_as_the_checkpoint_does(
    tmp_path: Path, name: str
) -> None:
    reader = DictReader(TINY_BIASED)
    reader.arrays[name].flat[-1] = 1e5
    if name.endswith(IN_FLOAT32):
        export_portable(TINY_BIASED, reader, tmp_path / "out", precision="fp16")
        return
    with pytest.raises(BuildError, match=rf"^{name}: a weight is beyond the range of fp16"):
        export_portable(TINY_BIASED, reader, tmp_path / "out", precision="fp16")
    assert not list(tmp_path.iterdir())


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="block_size must be at least 1, not 0"):
        export(tiny_spec(), tmp_path / "out", block_size=0)
    with pytest.raises(ConfigError, match="precision 'fp64' is unknown"):
        export(tiny_spec(), tmp_path / "out", precision="fp64")


def test_a_query_bottleneck_has_its_own_norm_and_biases(tmp_path: Path) -> None:
    attention = LatentAttentionSpec(2, 8, 12, 6, 4, 5, 0.3, bias=True)
    model = export(tiny_spec(attention=attention), tmp_path / "out")
    by_name = {node.name: node for node in model.graph.node}
    assert by_name["layers.0.attention.q_kv_a"].op_type == "LinearBias"
    assert by_name["layers.0.attention.q_norm"].op_type == "RMSNorm"
    assert by_name["layers.0.attention.q_b"].op_type == "Linear"
    assert weight(model, "layers.0.attention.q_kv_a.weight").shape == (8 + 16, 16)
