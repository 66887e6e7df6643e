"""End tritonserver together with its stubs, whatever state they are in."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_POLL_S = 0.02
_EXIT_CODE = 49  # index of the wait status in what _stat_fields returns
_KILL_TIMEOUT_S = 10.0  # a killed process that still runs hangs in the kernel


def members(group: int) -> list[int]:
    """Return the process ids in process group `group` that still run (zombies do not)."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        fields = _stat_fields(pid)
        if fields is not None and fields[0] not in "ZX" and int(fields[2]) == group:
            found.append(pid)
    return found


def is_running(pid: int) -> bool:
    """Return whether `pid` exists and is not a zombie."""
    fields = _stat_fields(pid)
    return fields is not None and fields[0] not in "ZX"


def how_it_ended(pid: int) -> str:
    """Return "signal N" or "status N" of a zombie, and "" when its parent has reaped it."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] != "Z":
        return ""
    code = os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))
    return f"signal {-code}" if code < 0 else f"status {code}"


def end_group(leader: int, grace_s: float) -> None:
    """Stop `leader` with SIGTERM, then kill whatever is left of the group that it leads.

    Only the leader is asked: tritonserver stops its own stubs, and hangs when they are stopped
    beside it. Returns when no process of the group runs any more.
    """
    if is_running(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while is_running(leader) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    kill_group(leader)


def kill_group(group: int) -> None:
    """Kill every process of `group` and return when none runs any more."""
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while members(group) and time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        time.sleep(_POLL_S)


def _stat_fields(pid: int) -> list[str] | None:
    """Return state, parent, process group … of /proc/<pid>/stat (see proc(5))."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold spaces and parentheses itself.
    return stat.rpartition(")")[2].split()
