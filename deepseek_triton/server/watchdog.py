"""Clean up after a launcher that died: python -m deepseek_triton.server.watchdog.

    watchdog LEADER_PID SHM_PREFIX RUN_DIR  < pipe held open by the launcher

The pipe ends when the launcher does, however it ended (SIGKILL included); then the server and
its stubs are stopped and their files are removed. A launcher that stops in good order does all
that itself and dismisses the watchdog.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from deepseek_triton.server.process_group import end_group
from deepseek_triton.server.shared_memory import remove_regions

_GRACE_S = 3.0  # nobody waits for the answers of requests in flight any more


def start_watchdog(leader: int, shm_prefix: str, run_dir: Path) -> subprocess.Popen[bytes]:
    """Start a watchdog whose stdin is a pipe held by this process; kill it to dismiss it."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(leader), shm_prefix, str(run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(arguments: list[str]) -> None:
    """Wait for the end of standard input, then clean up."""
    leader, shm_prefix, run_dir = arguments
    sys.stdin.buffer.read()
    end_group(int(leader), _GRACE_S)
    remove_regions(shm_prefix)
    shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
