from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PERF = Path(__file__).resolve().parents[3] / "perf"


@pytest.fixture
def smoke(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PERF))
    return importlib.import_module("perf_smoke")


def request(smoke: ModuleType, start: int, **last: Any) -> dict[str, Any]:
    """One request of a profile: its tokens come every millisecond, from 5 ms on."""
    times = [start + 5_000_000 + i * 1_000_000 for i in range(smoke.TOKENS)]
    outputs: list[dict[str, Any]] = [{"finish_reason": ""}] * (smoke.TOKENS - 1)
    outputs = [*outputs, {"num_output_tokens": smoke.TOKENS, "finish_reason": "length", **last}]
    return {"timestamp": start, "response_timestamps": times, "response_outputs": outputs}


def test_a_good_profile_becomes_a_row(smoke: ModuleType) -> None:
    requests = [request(smoke, i * 20_000_000) for i in range(smoke.REQUESTS)]
    row = smoke.check(1, requests)
    assert row.first_token == pytest.approx(0.005)
    assert row.between_tokens == pytest.approx(0.001)
    assert row.tokens_per_second == pytest.approx(800, rel=0.01)


@pytest.mark.parametrize(
    "last", [{"num_output_tokens": 15}, {"finish_reason": "error"}, {"finish_reason": ""}], ids=str
)
def test_a_request_without_its_tokens_is_an_error(smoke: ModuleType, last: dict[str, Any]) -> None:
    requests = [request(smoke, 0) for _ in range(smoke.REQUESTS - 1)]
    with pytest.raises(smoke.SmokeError, match="did not get"):
        smoke.check(1, [*requests, request(smoke, 0, **last)])


def test_missing_requests_are_an_error(smoke: ModuleType) -> None:
    with pytest.raises(smoke.SmokeError, match="0 requests at concurrency 3"):
        smoke.check(3, [])


FAKE = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--input-data") + 1]).parent
exported = sys.argv[sys.argv.index("--profile-export-file") + 1]
runs = folder / "runs"
runs.write_text((runs.read_text() if runs.exists() else "") + ".")
whole = json.dumps({"experiments": [{"requests": ["a request"]}]})
pathlib.Path(exported).write_text(whole if len(runs.read_text()) > EMPTY else "")
"""


@pytest.mark.parametrize("empty", [0, 2, 3])
def test_an_empty_export_is_measured_again_but_not_forever(
    smoke: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty: int
) -> None:
    program = [sys.executable, "-c", FAKE.replace("EMPTY", str(empty))]
    monkeypatch.setattr(smoke, "perf_analyzer", lambda: program)
    if empty < smoke.ATTEMPTS:
        assert smoke.profile("localhost:1", 1, tmp_path) == ["a request"]
        assert (tmp_path / "runs").read_text() == "." * (empty + 1)
    else:
        with pytest.raises(smoke.SmokeError, match="exported nothing, 3 times"):
            smoke.profile("localhost:1", 1, tmp_path)
