"""Time and memory of a TensorRT-RTX build of 61 layers of DeepSeek-V3's shape at reduced width.

The layers have V3's structure, rows of 576 numbers in the KV cache and three dense layers in front;
hidden size, heads, experts and their width are smaller. Memory is the peak of the process: what it
holds itself (RssAnon), and with the files that it has mapped (VmHWM). TensorRT-RTX compiles on one
core: where others use the machine, the time that the build spent computing says more than its
duration.

    python perf/bench_tensorrt_build.py              # writes perf/results/tensorrt_build.json
    python perf/bench_tensorrt_build.py --layers 8   # a quick look; keeps nothing
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_build import SCRIPT
from bench_engine import CACHE
from record import save_result

from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint

LIMIT_SECONDS = 180
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 384,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 1024,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
}


def memory(pid: int) -> dict[str, int]:
    """Return the RssAnon and VmHWM of a process in bytes; nothing once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return {}
    fields = (line.split() for line in status.splitlines())
    return {f[0].rstrip(":"): int(f[1]) * 1024 for f in fields if f[0] in ("RssAnon:", "VmHWM:")}


def main() -> None:
    """Build once while watching, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--checkpoint", type=Path, help="instead of random weights")
    args = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        folder = Path(name)
        checkpoint = args.checkpoint
        if checkpoint is None:
            config = preset_config("v3") | SHAPE | {"num_hidden_layers": args.layers}
            checkpoint = write_random_checkpoint(folder / "checkpoint", config, dtype="bfloat16")
        command = [sys.executable, str(SCRIPT), "--target", "tensorrt_rtx", "--sm", "89"]
        command += ["--precision", args.precision, "--checkpoint", str(checkpoint)]
        started = time.perf_counter()
        process = subprocess.Popen([*command, "--engine", str(folder / "engine")])
        peak: dict[str, int] = {}
        while process.poll() is None:
            now = memory(process.pid)
            peak = {key: max(now.get(key, 0), peak.get(key, 0)) for key in {*now, *peak}}
            time.sleep(0.01)
        seconds = time.perf_counter() - started
        if process.returncode:
            sys.exit(f"the build failed with exit status {process.returncode}")
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        engine_bytes = (folder / "engine" / "model.engine").stat().st_size
    measured = {
        "layers": args.layers,
        "precision": args.precision,
        "shape": SHAPE if args.checkpoint is None else str(args.checkpoint),
        "engine_mb": round(engine_bytes / 1e6, 1),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "limit_seconds": LIMIT_SECONDS,
        "peak_anonymous_mb": round(peak["RssAnon"] / 1e6, 1),
        "peak_resident_mb": round(peak["VmHWM"] / 1e6, 1),
        "peak_anonymous_per_engine_byte": round(peak["RssAnon"] / engine_bytes, 2),
    }
    print(measured)
    if args.layers == 61:
        print(save_result("tensorrt_build", measured))


if __name__ == "__main__":
    main()
