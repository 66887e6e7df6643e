from __future__ import annotations

import pytest

from deepseek_triton.gateway import pool


@pytest.fixture(autouse=True)
def nothing_to_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers are in this process: gRPC has nobody to tell of cancelled calls."""
    monkeypatch.setattr(pool, "_CANCEL_S", 0.0)
