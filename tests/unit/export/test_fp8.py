from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.fields import Fields
from deepseek_triton.checkpoint.fp8 import present_fp8
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.export.portable import WEIGHTS_FILE, export_portable
from deepseek_triton.export.weights import WeightFile
from deepseek_triton.quantize.checkpoint import open_checkpoint

BLOCK = 32
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_fp8_checkpoint_exports_the_bytes_of_the_dense_one(
    tmp_path: Path, precision: str
) -> None:
    config = preset_config("v3") | {"num_hidden_layers": 2, "hidden_size": 120}
    source = CheckpointReader(write_random_checkpoint(tmp_path / "source", config))
    stored, dense = {}, {}
    for name in source.names():
        array = np.array(source.read(name), np.float32)
        stored[name] = dense[name] = array
        if name.endswith("_proj.weight"):
            rows, columns = array.shape
            scales = np.random.default_rng(len(stored)).uniform(
                1e-3, 4e-3, (-(-rows // BLOCK), -(-columns // BLOCK))
            )
            stored[name] = (array / 2e-3).astype(ml_dtypes.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales.astype(np.float32)
            expanded = np.kron(stored[f"{name}_scale_inv"], np.ones((BLOCK, BLOCK), np.float32))
            dense[name] = stored[name].astype(np.float32) * expanded[:rows, :columns]
    weights = []
    for kind, tensors, extra in (
        ("fp8", stored, {"quantization_config": QUANTIZATION}),
        ("dense", dense, {}),
    ):
        folder = tmp_path / kind
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | extra))
        spec = read_model_spec(folder)
        out = tmp_path / f"{kind}-onnx"
        export_portable(spec, open_checkpoint(folder, spec), out, precision=precision)
        weights.append((out / WEIGHTS_FILE).read_bytes())
    assert weights[0] == weights[1]


def test_blocks_of_an_fp8_tensor_never_hold_it_whole(tmp_path: Path) -> None:
    rows, columns, name = 4096, 4096, "model.layers.0.mlp.up_proj.weight"
    tensors = {
        name: np.ones((rows, columns), ml_dtypes.float8_e4m3fn),
        f"{name}_scale_inv": np.ones((rows // BLOCK, columns // BLOCK), np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    present_fp8(reader, Fields(QUANTIZATION, "quantization_config"))
    file = WeightFile()
    file.add("w", (rows, columns), np.dtype(np.float16), reader.blocks(name, (rows, columns)))
    del tensors
    tracemalloc.start()
    try:
        file.write(tmp_path / WEIGHTS_FILE, reader.release)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / WEIGHTS_FILE).stat().st_size == 2 * rows * columns
    assert peak < rows * columns  # bytes; a quarter of the tensor in float32
