"""Speed and memory of converting a checkpoint of 60 layers and 8 GB, against cp of the same files.

Both write to the same disk and flush it. The checkpoint is float16 and so is the engine (target
cuda, whose engine is the portable model itself), so that every byte is read, written and hashed;
a bfloat16 checkpoint is converted as well. Memory is the peak of RssAnon, as in bench_build.py.

    python perf/bench_conversion.py        # writes perf/results/conversion.json; takes 30 GB
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_build import SCRIPT, anonymous_memory
from bench_engine import CACHE
from record import save_result

from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint

ROUNDS = 3
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


def convert(checkpoint: Path, folder: Path) -> tuple[float, int]:
    """Seconds of a build, and its peak of anonymous memory in bytes."""
    settle()
    command = [sys.executable, str(SCRIPT), "--checkpoint", str(checkpoint)]
    command += ["--target", "cuda", "--precision", "fp16", "--engine", str(folder / "engine")]
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(command)
    while process.poll() is None:
        peak = max(peak, anonymous_memory(process.pid))
        time.sleep(0.01)
    seconds = time.perf_counter() - started
    if process.returncode:
        sys.exit(f"the build failed with exit status {process.returncode}")
    shutil.rmtree(folder / "engine")
    return seconds, peak


def measure(dtype: str) -> dict[str, Any]:
    """Copy and convert in turns."""
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        folder = Path(name)
        checkpoint = folder / "checkpoint"
        write_random_checkpoint(checkpoint, CONFIG, dtype=dtype, num_shards=4)
        size = sum(file.stat().st_size for file in checkpoint.iterdir())
        rounds = [(copy(checkpoint, folder), *convert(checkpoint, folder)) for _ in range(ROUNDS)]
    copies, conversions, peaks = zip(*rounds, strict=True)
    return {
        "checkpoint_gb": round(size / 1e9, 2),
        "copy_s": round(statistics.median(copies), 1),
        "conversion_s": round(statistics.median(conversions), 1),
        "share_of_copy_speed": round(statistics.median(copies) / statistics.median(conversions), 3),
        "peak_anonymous_mb": round(max(peaks) / 1e6, 1),
        "rounds": [
            {"copy_s": one, "conversion_s": other, "peak_anonymous_mb": peak / 1e6}
            for one, other, peak in rounds
        ],
    }


def main() -> None:
    """Measure both kinds of checkpoint and keep the result."""
    CACHE.mkdir(parents=True, exist_ok=True)
    measured = {dtype: measure(dtype) for dtype in ("float16", "bfloat16")}
    for dtype, result in measured.items():
        print(dtype, {key: value for key, value in result.items() if key != "rounds"})
    print(save_result("conversion", measured))


if __name__ == "__main__":
    main()
