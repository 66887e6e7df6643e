from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.calibrate import quantize as module
from deepseek_triton.calibrate.layer_model import embed
from deepseek_triton.calibrate.layer_quantizer import LayerQuantizer
from deepseek_triton.calibrate.quantize import QuantizeOptions, quantize_checkpoint
from deepseek_triton.calibrate.statistics import Activations
from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.errors import BuildError, CheckpointError, ConfigError
from deepseek_triton.quantize.awq_search import Scheme
from deepseek_triton.request import RequestKey
from deepseek_triton.runner.base import StepRow
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
from tests.unit.calibrate.reading import raw_tensors, weight_of

DEMO = Path(__file__).parents[3] / "models" / "demo"
TEXT = ["def f(x):\n    return x + 1\n" * 40, "A text that is something else. " * 30]
V3: dict[str, Any] = preset_config("v3") | {"num_hidden_layers": 3, "n_routed_experts": 8}
OPTIONS = QuantizeOptions(group_size=32, num_windows=4, window=48)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantize") / "checkpoint"
    return write_random_checkpoint(folder, V3, dtype="bfloat16")


@pytest.fixture(scope="module")
def quantized(checkpoint: Path) -> Path:
    out = checkpoint.with_name("awq")
    quantize_checkpoint(checkpoint, out, OPTIONS, TEXT)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("config", [V3, preset_config("qwen2")], ids=["v3", "qwen2"])
def test_the_layers_run_as_the_engine_does(tmp_path: Path, config: dict[str, Any]) -> None:
    checkpoint = write_random_checkpoint(tmp_path / "checkpoint", config)
    spec, reader = read_model_spec(checkpoint), CheckpointReader(checkpoint)
    ids = np.random.default_rng(0).integers(3, 4000, 30).astype(np.int32)
    hidden = embed(spec, reader, ids[None, :-1])
    for layer in range(spec.num_layers):
        quantizer = LayerQuantizer(spec, reader, layer, Scheme(32, False, np.dtype(np.float32)))
        outputs = np.zeros_like(hidden)
        quantizer.calibrate(hidden, outputs)
        hidden = outputs
    norm = np.asarray(reader.read("model.norm.weight"), np.float64)
    last = hidden[0].astype(np.float64)
    normed = last / np.sqrt((last**2).mean(axis=-1, keepdims=True) + spec.rms_norm_eps) * norm
    head = "model.embed_tokens" if spec.tie_word_embeddings else "lm_head"
    logits = normed @ np.asarray(reader.read(f"{head}.weight"), np.float64).T
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    build_engine(checkpoint, tmp_path / "engine")
    runner = OnnxRuntimeRunner.load(tmp_path / "engine", num_blocks=4, num_threads=1)
    row = StepRow(RequestKey("r"), ids[:-1], 0, np.arange(2, dtype=np.int32), None)
    scores = runner.score((row,))[0].log_probs[:-1]
    np.testing.assert_allclose(scores, expected[np.arange(28), ids[1:-1]], atol=2e-5)


def test_the_output_is_a_checkpoint_of_compressed_tensors(
    checkpoint: Path, quantized: Path
) -> None:
    config = json.loads((quantized / "config.json").read_text())
    original = json.loads((checkpoint / "config.json").read_text())
    scheme = config.pop("quantization_config")
    assert config == original
    assert scheme["quant_method"] == "compressed-tensors"
    before, after = raw_tensors(checkpoint), raw_tensors(quantized)
    index = json.loads((quantized / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(after)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        np.testing.assert_array_equal(after[name], before[name])
    packed = {name.removesuffix("_packed") for name in after if name.endswith("_packed")}
    assert packed == {n for n in before if n not in after}
    assert len(packed) == 3 * (4 + 3) + 2 * 8 * 3 - 2 * (8 + 1)  # down of 48 channels is left
    for name in packed:
        weight = before[name].astype(np.float32)
        assert after[f"{name}_shape"].tolist() == list(weight.shape)
        assert after[f"{name}_scale"].dtype == before[name].dtype
    assert (quantized / "tokenizer.json").read_bytes() == (
        checkpoint / "tokenizer.json"
    ).read_bytes()
    assert not (quantized / "records").exists()


def test_the_report_tells_what_became_of_each_layer(checkpoint: Path, quantized: Path) -> None:
    report = json.loads((quantized / "quantization_report.json").read_text())
    linears = {linear["name"]: linear for linear in report["linears"]}
    assert len(linears) == 3 * 7 + 2 * 8 * 3 - 2 * 9
    assert all(name.endswith("down_proj") for name in report["left_in_floating_point"])
    assert len(report["left_in_floating_point"]) == 2 * 9
    assert report["widened_by_make_engine"] == [f"model.layers.{i}.mlp.experts." for i in (1, 2)]
    assert report["calibration"]["tokens"] == 4 * 48
    o_proj = linears["model.layers.2.self_attn.o_proj"]
    assert o_proj["tokens"] == 192
    assert 0 < o_proj["error"] < o_proj["rtn_error"] < 0.02
    seen = [linear for linear in linears.values() if linear["tokens"]]
    better = [linear["error"] < linear["rtn_error"] for linear in seen]
    assert np.mean(better) > 0.95
    assert report["bytes_after"] < report["bytes_before"]


def test_experts_that_saw_no_token_are_rounded_and_reported(
    checkpoint: Path, tmp_path: Path
) -> None:
    few = QuantizeOptions(group_size=32, num_windows=1, window=1)
    report = quantize_checkpoint(checkpoint, tmp_path / "out", few, TEXT)
    unseen = report["without_tokens"]
    # One token reaches four of the eight experts in each of two layers.
    assert len(unseen) == 2 * 4 * 2
    assert all(".experts." in name for name in unseen)
    spec = read_model_spec(checkpoint)
    name = next(n for n in unseen if n.endswith("gate_proj"))
    # The norm before it took a scale; the rounded weight took the inverse, so divide it out.
    layer = int(name.split(".")[2])
    norm = f"model.layers.{layer}.post_attention_layernorm.weight"
    before, after = raw_tensors(checkpoint), raw_tensors(tmp_path / "out")
    scale = before[norm].astype(np.float32) / after[norm]
    found = weight_of(after, name, 32) / scale
    exact = before[f"{name}.weight"].astype(np.float32)
    assert found.shape == (spec.moe.expert_intermediate_size, spec.hidden_size)  # type: ignore[union-attr]
    assert ((found - exact) ** 2).sum() < 0.03 * (exact**2).sum()


def test_round_to_nearest_reads_no_text_and_changes_nothing_else(
    checkpoint: Path, tmp_path: Path
) -> None:
    options = QuantizeOptions("rtn", 32, symmetric=True)
    report = quantize_checkpoint(checkpoint, tmp_path / "out", options, iter(()))
    assert report["without_tokens"] == []
    before, after = raw_tensors(checkpoint), raw_tensors(tmp_path / "out")
    for name, array in before.items():
        if name in after:
            np.testing.assert_array_equal(after[name], array)
    name = "model.layers.1.self_attn.q_b_proj"
    assert f"{name}.weight_zero_point" not in after
    exact = before[f"{name}.weight"].astype(np.float32)
    step = np.repeat(after[f"{name}.weight_scale"].astype(np.float32), 32, axis=1)
    assert (np.abs(weight_of(after, name, 32) - exact) <= 0.55 * step).mean() > 0.95


def test_what_cannot_be_rounded_collects_no_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V2-Lite's dense layer: groups of 128 do not fill its 10,944 channels."""
    config = preset_config("v2-lite") | {"num_hidden_layers": 1, "intermediate_size": 208}
    checkpoint = write_random_checkpoint(tmp_path / "checkpoint", config)
    widths = []
    of_width = Activations.of_width

    def recorded(width: int) -> Activations:
        widths.append(width)
        return of_width(width)

    monkeypatch.setattr(Activations, "of_width", recorded)
    report = quantize_checkpoint(checkpoint, tmp_path / "out", OPTIONS, TEXT)
    assert report["left_in_floating_point"] == ["model.layers.0.mlp.down_proj"]
    assert report["widened_by_make_engine"] == []  # there are no experts
    assert widths and 208 not in widths
    kept = CheckpointReader(tmp_path / "out").read("model.layers.0.mlp.down_proj.weight")
    exact = CheckpointReader(checkpoint).read("model.layers.0.mlp.down_proj.weight")
    np.testing.assert_array_equal(kept, exact)


@pytest.mark.parametrize("group_size", [32, 128])  # 128 does not fill every layer
def test_a_disk_without_room_is_refused_before_the_first_layer(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_size: int
) -> None:
    out, options = tmp_path / "out", QuantizeOptions("rtn", group_size)
    needed = quantize_checkpoint(checkpoint, out, options, [])["bytes_after"]
    other = tmp_path / "other"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    with pytest.raises(BuildError, match="GB are to be written"):
        quantize_checkpoint(checkpoint, other, options, [])
    assert not list(tmp_path.rglob("other*/*.safetensors"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    quantize_checkpoint(checkpoint, other, options, [])
    assert (
        contents(other)["model.safetensors.index.json"]
        == (contents(out)["model.safetensors.index.json"])
    )


def test_rounding_to_nearest_multiplies_no_matrices(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product with the identity for each error took ten times as long as the rounding."""

    def eye(*_: object, **__: object) -> None:
        raise AssertionError("an identity matrix")

    monkeypatch.setattr(np, "eye", eye)
    report = quantize_checkpoint(checkpoint, tmp_path / "out", QuantizeOptions("rtn", 32), [])
    reader, tensors = CheckpointReader(checkpoint), raw_tensors(tmp_path / "out")
    for entry in report["linears"]:
        exact = reader.read(entry["name"] + ".weight").astype(np.float64)
        found = weight_of(tensors, entry["name"], 32)
        expected = ((exact - found) ** 2).sum() / (exact**2).sum()
        assert entry["error"] == entry["rtn_error"] == pytest.approx(expected, rel=1e-4)


def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = write_random_checkpoint(tmp_path / "checkpoint", V3, dtype="bfloat16")
    tensors = load_torch(checkpoint / "model.safetensors")
    tensors["model.layers.1.self_attn.q_b_proj.weight"][3, 5] = float("nan")
    save_torch(tensors, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_b_proj\.weight holds"):
        quantize_checkpoint(checkpoint, tmp_path / "out", QuantizeOptions("rtn", 32), iter(()))
    assert not (tmp_path / "out").exists()


def test_an_fp8_checkpoint_is_read_as_what_it_stands_for(checkpoint: Path, tmp_path: Path) -> None:
    dense, narrow = tmp_path / "dense", tmp_path / "fp8"
    (file,) = checkpoint.glob("*.safetensors")
    tensors = load_torch(file)
    fp8 = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "proj" in name:
            stored = (tensor.float() * 8).to(torch.float8_e4m3fn)
            blocks = [-(-size // 128) for size in tensor.shape]
            fp8 |= {name: stored, f"{name}_scale_inv": torch.full(blocks, 0.125)}
            tensors[name] = (stored.float() / 8).to(tensor.dtype)
        else:
            fp8[name] = tensor
    config = json.loads((checkpoint / "config.json").read_text())
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    for folder, weights, extra in (
        (dense, tensors, {}),
        (narrow, fp8, {"quantization_config": scheme}),
    ):
        folder.mkdir()
        save_torch(weights, folder / file.name)
        (folder / "config.json").write_text(json.dumps(config | extra))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((checkpoint / name).read_bytes())
        report = quantize_checkpoint(folder, tmp_path / f"{folder.name}-out", OPTIONS, TEXT)
        assert report["bytes_before"] == (folder / file.name).stat().st_size
    expected, found = (raw_tensors(tmp_path / f"{name}-out") for name in ("dense", "fp8"))
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    written = json.loads((tmp_path / "fp8-out" / "config.json").read_text())
    assert written["quantization_config"]["quant_method"] == "compressed-tensors"


def test_an_interrupted_run_goes_on_to_the_same_bytes(
    checkpoint: Path, quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    calibrate, linears = LayerQuantizer.calibrate, LayerQuantizer.linears

    def counted(self: LayerQuantizer, *arguments: Any) -> None:
        calls.append(self._layer)
        calibrate(self, *arguments)

    def interrupted(self: LayerQuantizer) -> Any:
        for index, linear in enumerate(linears(self)):
            if self._layer == 1 and index == 5:
                raise KeyboardInterrupt
            yield linear

    monkeypatch.setattr(LayerQuantizer, "calibrate", counted)
    monkeypatch.setattr(LayerQuantizer, "linears", interrupted)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(checkpoint, out, OPTIONS, TEXT)
    assert not out.exists()
    monkeypatch.setattr(LayerQuantizer, "linears", linears)
    # What a power cut could leave of a layer that is not finished.
    (tmp_path / "out.partial" / "model-layer-001-1.safetensors").write_bytes(b"half")
    calls.clear()
    quantize_checkpoint(checkpoint, out, OPTIONS, TEXT)
    assert calls == [1, 2]
    assert contents(out) == contents(quantized)
    assert os.listdir(tmp_path) == ["out"]


def test_other_settings_begin_anew(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module.Workspace, "publish", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(checkpoint, out, QuantizeOptions("rtn", 32), TEXT)
    other = QuantizeOptions("rtn", 64)
    quantize_checkpoint(checkpoint, out, other, TEXT)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 64


def test_what_cannot_be_done_is_refused_before_anything_is_written(
    checkpoint: Path, quantized: Path, tmp_path: Path
) -> None:
    def refused(message: str, source: Path = checkpoint, **options: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            quantize_checkpoint(source, tmp_path / "out", QuantizeOptions(**options), ["short"])

    refused("METHOD: 'gptq' is not one of awq, rtn", method="gptq")
    refused("GROUP: 48 is not one of", group_size=48)
    refused("CALIBRATION: the text has .* tokens, 32768 are needed")
    refused("window length: 5000 is more than the model's context", window=5000)
    refused("INT4 already", source=quantized)
    assert os.listdir(tmp_path) == []
    with pytest.raises(ConfigError, match="OUT: .* exists already"):
        quantize_checkpoint(checkpoint, quantized, QuantizeOptions("rtn", 32), TEXT)
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "precious").write_text("")
    with pytest.raises(ConfigError, match="not of an interrupted run"):
        quantize_checkpoint(checkpoint, tmp_path / "out", QuantizeOptions("rtn", 32), TEXT)


def test_search_beats_rounding_on_a_model_that_has_learned_something() -> None:
    spec, reader = read_model_spec(DEMO), CheckpointReader(DEMO)
    ids = np.random.default_rng(0).integers(3, 4000, (4, 256)).astype(np.int32)
    hidden = embed(spec, reader, ids)
    quantizer = LayerQuantizer(spec, reader, 0, Scheme(128, False, np.dtype(np.float32)))
    quantizer.calibrate(hidden, np.zeros_like(hidden))
    for linear in quantizer.linears():
        assert linear.report.error < 0.9 * linear.report.rtn_error, linear.report.name
