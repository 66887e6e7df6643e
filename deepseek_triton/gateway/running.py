"""The requests that are being answered, so that a gateway that stops can end them in words."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any


class RunningRequests:
    """Belongs to one event loop. Each request is a task that holds its place while it runs."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.ended = False

    def __len__(self) -> int:
        return len(self._tasks)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Count the current task as a request for the time of the block."""
        task = asyncio.current_task()
        if task is None:  # pragma: no cover - an event loop runs nothing but tasks here
            yield
            return
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def end(self) -> None:
        """Cancel all of them. A task then finds `ended` true, and tells its client why."""
        self.ended = True
        for task in self._tasks:
            task.cancel()
