"""Speed and memory of converting a checkpoint of 60 layers, against cp of the same files.

Both write to the same disk and flush it. The target is cuda, whose engine is the portable model
itself, so that every byte is read, written and hashed. Checkpoints: 8 GB of float16 and of
bfloat16, and the same weights as DeepSeek's FP8, 4 GB, whose engine is twice as large as what cp
writes: share_of_copy_rate therefore counts bytes read and written per second. Memory is the peak
of RssAnon, as in bench_build.py. The first round is not counted: a virtual machine's host may
have to find the memory first, and that takes longer than the copy.

    python perf/bench_conversion.py        # writes perf/results/conversion.json; takes 35 GB
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from bench_build import SCRIPT, anonymous_memory
from bench_engine import CACHE
from numpy.typing import NDArray
from record import save_result

from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.checkpoint.writer import LazyTensor, write_safetensors

ROUNDS = 3
FP8, BLOCK = np.dtype(ml_dtypes.float8_e4m3fn), 128
CONFIG = {
    **preset_config("v3"),
    "hidden_size": 2048,
    "num_hidden_layers": 60,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 8192,
    "moe_intermediate_size": 512,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "vocab_size": 32768,
}


def write_fp8_checkpoint(source: Path, folder: Path) -> None:
    """Write the checkpoint `source` with its projections in FP8, as DeepSeek publishes V3."""
    folder.mkdir()
    reader, tensors = CheckpointReader(source), []
    for name in reader.names():
        shape, dtype = reader.shape(name), reader.dtype(name)
        if not name.endswith("_proj.weight"):
            tensors.append(LazyTensor(name, dtype, shape, [reader.read(name)]))
            continue
        grid = tuple(-(-size // BLOCK) for size in shape)
        scale = np.float32(8 * shape[1] ** -0.5 / 448)  # about the largest of random weights
        scales = [np.full(grid, scale)]
        tensors.append(LazyTensor(name, FP8, shape, fp8_rows(reader, name, scale)))
        tensors.append(LazyTensor(f"{name}_scale_inv", np.dtype(np.float32), grid, scales))
    write_safetensors(folder / "model.safetensors", tensors, reader.release)
    for file in source.glob("*.json"):
        if not file.name.startswith("model"):
            shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def fp8_rows(reader: CheckpointReader, name: str, scale: np.float32) -> Iterator[NDArray[Any]]:
    """Yield a tensor's values over `scale` in FP8; those beyond its range are cut."""
    for block in reader.blocks(name, reader.shape(name)):
        values = block().astype(np.float32) / scale
        yield np.clip(values, -448, 448, out=values).astype(FP8)


def settle() -> None:
    """Let the disk finish what earlier work left to it."""
    os.sync()


def copy(checkpoint: Path, folder: Path) -> float:
    """Seconds of cp and of flushing what it wrote."""
    settle()
    started = time.perf_counter()
    subprocess.run(["cp", "-r", checkpoint, folder / "copy"], check=True)
    for file in (folder / "copy").iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    seconds = time.perf_counter() - started
    shutil.rmtree(folder / "copy")
    return seconds


def convert(checkpoint: Path, folder: Path, precision: str) -> tuple[float, int, int]:
    """Seconds of a build, its peak of anonymous memory in bytes, and the engine's bytes."""
    settle()
    command = [sys.executable, str(SCRIPT), "--checkpoint", str(checkpoint)]
    command += ["--target", "cuda", "--precision", precision, "--engine", str(folder / "engine")]
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(command)
    while process.poll() is None:
        peak = max(peak, anonymous_memory(process.pid))
        time.sleep(0.01)
    seconds = time.perf_counter() - started
    if process.returncode:
        sys.exit(f"the build failed with exit status {process.returncode}")
    written = size_of(folder / "engine")
    shutil.rmtree(folder / "engine")
    return seconds, peak, written


def size_of(folder: Path) -> int:
    """Bytes of all files of a folder."""
    return sum(file.stat().st_size for file in folder.iterdir())


def measure(checkpoint: Path, folder: Path, precision: str) -> dict[str, Any]:
    """Copy and convert in turns."""
    size = size_of(checkpoint)
    rounds = []
    for number in range(ROUNDS + 1):
        copied = copy(checkpoint, folder)
        converted, peak, written = convert(checkpoint, folder, precision)
        print(f"{checkpoint.name} to {precision}: {copied:.1f} s, {converted:.1f} s", flush=True)
        if number:
            rounds.append((copied, converted, peak))
    copies, conversions, peaks = zip(*rounds, strict=True)
    share = statistics.median(copies) / statistics.median(conversions)
    return {
        "checkpoint_gb": round(size / 1e9, 2),
        "engine_gb": round(written / 1e9, 2),
        "copy_s": round(statistics.median(copies), 1),
        "conversion_s": round(statistics.median(conversions), 1),
        "share_of_copy_speed": round(share, 3),
        "share_of_copy_rate": round(share * (size + written) / (2 * size), 3),
        "peak_anonymous_mb": round(max(peaks) / 1e6, 1),
        "rounds": [
            {"copy_s": one, "conversion_s": other, "peak_anonymous_mb": peak / 1e6}
            for one, other, peak in rounds
        ],
    }


def main() -> None:
    """Measure each kind of checkpoint and keep the result."""
    CACHE.mkdir(parents=True, exist_ok=True)
    measured = {}
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        folder = Path(name)
        for dtype in ("float16", "bfloat16", "fp8"):
            checkpoint = folder / dtype
            if dtype == "fp8":
                write_fp8_checkpoint(folder / "bfloat16", checkpoint)
                shutil.rmtree(folder / "bfloat16")
            else:
                write_random_checkpoint(checkpoint, CONFIG, dtype=dtype, num_shards=4)
            for precision in ("bf16", "fp16") if dtype == "fp8" else ("fp16",):
                measured[f"{dtype} to {precision}"] = measure(checkpoint, folder, precision)
            if dtype == "float16":
                shutil.rmtree(checkpoint)
    for case, result in measured.items():
        print(case, {key: value for key, value in result.items() if key != "rounds"})
    print(save_result("conversion", measured))


if __name__ == "__main__":
    main()
