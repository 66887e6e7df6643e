"""INT4 layers as other tools store them, and their values by the formula.

The encoders were compared once with compressed-tensors 0.20.1 and AutoAWQ's packing.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.checkpoint.reader import CheckpointReader

Tensors = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Layer:
    """A quantised layer as its tool knows it; group[k] is the group of input k."""

    codes: NDArray[np.int64]  # [N, K] 0 … 15
    scales: NDArray[np.float16]  # [N, G]
    zeros: NDArray[np.int64]  # [N, G] 0 … 15
    group: NDArray[np.int64]  # [K]

    def values(self) -> NDArray[np.float32]:
        """(code − zero point) · scale."""
        scales = self.scales.astype(np.float32)[:, self.group]
        return (self.codes - self.zeros[:, self.group]).astype(np.float32) * scales


def random_layer(
    rows: int,
    columns: int,
    group_size: int,
    *,
    seed: int = 0,
    symmetric: bool = False,
    order: bool = False,
) -> Layer:
    """Return a layer of random codes; `order` spreads each group over the inputs."""
    rng = np.random.default_rng(seed)
    groups = -(-columns // group_size)
    group = np.arange(columns) // group_size
    zeros = rng.integers(1, 16, (rows, groups))
    return Layer(
        rng.integers(0, 16, (rows, columns)),
        rng.uniform(0.004, 0.02, (rows, groups)).astype(np.float16),
        np.full_like(zeros, 8) if symmetric else zeros,
        rng.permutation(group) if order else group,
    )


def _words(values: NDArray[np.int64], nibbles: tuple[int, ...]) -> NDArray[np.int32]:
    """Pack [R, C] along its last axis: nibble i of a word holds value nibbles[i] of its eight."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % 8))).astype(np.uint32)
    words = np.zeros((len(values), padded.shape[1] // 8), np.uint32)
    for place, column in enumerate(nibbles):
        words |= padded[:, column::8] << np.uint32(4 * place)
    return words.view(np.int32)


IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(source: str, layer: Layer) -> Tensors:
    """AutoAWQ, version gemm."""
    return {
        f"{source}.qweight": _words(layer.codes.T, AWQ_ORDER),
        f"{source}.qzeros": _words(layer.zeros.T, AWQ_ORDER),
        f"{source}.scales": np.ascontiguousarray(layer.scales.T),
    }


def gptq(source: str, layer: Layer, *, v2: bool = False, g_idx: bool = True) -> Tensors:
    """AutoGPTQ, or GPTQModel's second version."""
    zeros = layer.zeros if v2 else layer.zeros - 1
    tensors: Tensors = {
        f"{source}.qweight": np.ascontiguousarray(_words(layer.codes, IN_ORDER).T),
        f"{source}.qzeros": _words(zeros.T, IN_ORDER),
        f"{source}.scales": np.ascontiguousarray(layer.scales.T),
    }
    if g_idx:
        tensors[f"{source}.g_idx"] = layer.group.astype(np.int32)
    return tensors


def pack_quantized(
    source: str, layer: Layer, *, symmetric: bool = False, order: bool = False, packed: bool = True
) -> Tensors:
    """compressed-tensors; `packed` zero points, as it writes them today."""
    tensors: Tensors = {
        f"{source}.weight_packed": _words(layer.codes, IN_ORDER),
        f"{source}.weight_scale": layer.scales,
        f"{source}.weight_shape": np.array(layer.codes.shape, np.int64),
    }
    if not symmetric:
        tensors[f"{source}.weight_zero_point"] = (
            np.ascontiguousarray(_words(layer.zeros.T, IN_ORDER).T)
            if packed
            else (layer.zeros - 8).astype(np.int8)
        )
    if order:
        tensors[f"{source}.weight_g_idx"] = layer.group.astype(np.int32)
    return tensors


LINEAR = re.compile(r"model\.layers\..*_proj(_with_mqa)?\.weight")
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}


def packed_config(**weights: Any) -> dict[str, Any]:
    """compressed-tensors' quantization_config; `weights` replaces parts of the scheme."""
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": scheme | {"symmetric": False} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def write_int4_checkpoints(
    folder: Path,
    config: dict[str, Any],
    quantization: dict[str, Any],
    encode: Callable[[str, Layer], Tensors],
    *,
    group_size: int = 32,
    **layer: bool,
) -> tuple[Path, Path]:
    """Write a random checkpoint with INT4 layers, and one with their values; return the folders."""
    source = write_random_checkpoint(folder / "source", config)
    reader = CheckpointReader(source)
    quantized: Tensors = {}
    dense: Tensors = {}
    for index, name in enumerate(reader.names()):
        array = np.array(reader.read(name))
        dense[name] = array
        if LINEAR.fullmatch(name):
            stored = random_layer(*array.shape, group_size, seed=index, **layer)
            quantized |= encode(name.removesuffix(".weight"), stored)
            dense[name] = stored.values()
        else:
            quantized[name] = array
    for kind, tensors in (("int4", quantized), ("dense", dense)):
        shutil.copytree(source, folder / kind, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(tensors, folder / kind / "model.safetensors")
    stated = json.loads((source / "config.json").read_text())
    (folder / "int4" / "config.json").write_text(
        json.dumps(stated | {"quantization_config": quantization})
    )
    return folder / "int4", folder / "dense"
