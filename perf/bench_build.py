"""Memory and time of building an engine from the 1.6 GB reference checkpoint.

Memory is the peak of RssAnon, what the process itself holds; mapped files do not count, since
the kernel drops their pages when others need them. The limit that it is held against is 1.3 times
the largest tensor plus 300 MB.

    python perf/bench_build.py             # writes perf/results/build_memory.json
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_engine import CACHE
from record import save_result
from reference_model import write_reference_checkpoint

from deepseek_triton.checkpoint.reader import CheckpointReader

SCRIPT = Path(__file__).resolve().parents[1] / "build_scripts" / "build_engine.py"


def anonymous_memory(pid: int) -> int:
    """Bytes of RssAnon of a process, 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    lines = [line for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(lines[0].split()[1]) * 1024 if lines else 0


def main() -> None:
    """Build once while watching, and keep the result."""
    CACHE.mkdir(parents=True, exist_ok=True)
    checkpoint = write_reference_checkpoint(CACHE / "reference")
    reader = CheckpointReader(checkpoint)
    sizes = [reader.read(name).nbytes for name in reader.names()]
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, str(SCRIPT), "--checkpoint", str(checkpoint)]
        started = time.perf_counter()
        process = subprocess.Popen([*command, "--engine", str(Path(folder) / "engine")])
        peak = 0
        while process.poll() is None:
            peak = max(peak, anonymous_memory(process.pid))
            time.sleep(0.005)
        seconds = time.perf_counter() - started
    if process.returncode:
        sys.exit(f"the build failed with exit status {process.returncode}")
    limit = 1.3 * max(sizes) + 300e6
    measured = {
        "checkpoint_mb": round(sum(sizes) / 1e6, 1),
        "largest_tensor_mb": round(max(sizes) / 1e6, 1),
        "peak_anonymous_mb": round(peak / 1e6, 1),
        "limit_mb": round(limit / 1e6, 1),
        "share_of_limit": round(peak / limit, 3),
        "seconds": round(seconds, 1),
    }
    print(measured)
    print(save_result("build_memory", measured))


if __name__ == "__main__":
    main()
