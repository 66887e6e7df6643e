"""End the server when the process of one of its models dies.

tritonserver goes on without the model: it stays ready, and requests of the model hang.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path

from deepseek_triton.server.process_group import how_it_ended, is_running, kill_group, members

logger = logging.getLogger(__name__)

_POLL_S = 0.1


class StubWatch(threading.Thread):
    """Kills process group `leader` when a stub in it dies; `problem` then says which."""

    def __init__(self, leader: int, model_repository: Path, models: Iterable[str]) -> None:
        super().__init__(name="stub-watch", daemon=True)
        self.problem: str | None = None
        self._leader = leader
        self._stubs = find_stubs(leader, model_repository, models)
        self._stopped = threading.Event()

    def run(self) -> None:
        """Poll until a stub dies, the server ends or stop() is called."""
        while not self._stopped.wait(_POLL_S):
            dead = next((pid for pid in self._stubs if not is_running(pid)), None)
            # Stubs end with their server too, so the server is looked at after them.
            if not is_running(self._leader):
                return
            if dead is not None and not self._stopped.is_set():
                self._end(dead)
                return

    def stop(self) -> None:
        """Watch no longer: from now on the stubs may end."""
        self._stopped.set()
        if self.is_alive():
            self.join()

    def _end(self, pid: int) -> None:
        how = how_it_ended(pid)
        self.problem = (
            f"model {self._stubs[pid]}: its process died{f' ({how})' if how else ''}; "
            "restart the server"
        )
        logger.error("%s", self.problem)
        kill_group(self._leader)


def find_stubs(leader: int, model_repository: Path, models: Iterable[str]) -> dict[int, str]:
    """Return model by process id; an argument of a stub is the path of the model's file."""
    folders = {model: f"{model_repository.resolve()}/{model}/".encode() for model in models}
    found: dict[int, str] = {}
    for pid in members(leader):
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        for model, folder in folders.items():
            if any(argument.startswith(folder) for argument in arguments):
                found[pid] = model
    return found
