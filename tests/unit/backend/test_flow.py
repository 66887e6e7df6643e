from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepseek_triton.backend import flow as module
from deepseek_triton.backend.flow import Flow, FlowReport


def test_the_sender_sees_how_many_are_on_the_way() -> None:
    flow, report = Flow(), FlowReport()
    marks = [flow.mark() for _ in range(5)]
    assert flow.on_the_way(0.0) == 0, "nobody has reported: there may be no receiver"
    report.handled(marks[0])
    assert flow.on_the_way(0.0) == 4
    report.handled(marks[3])
    assert flow.on_the_way(0.0) == 1
    flow.mark()
    assert flow.on_the_way(0.0) == 2


def test_it_works_between_processes() -> None:
    flow = Flow()
    marks = [flow.mark() for _ in range(3)]
    code = f"from deepseek_triton.backend.flow import *; FlowReport().handled({marks[1]})"
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
    assert flow.on_the_way(0.0) == 1


def test_what_is_lost_is_given_up_after_a_silence() -> None:
    flow, report = Flow(), FlowReport()
    report.handled(flow.mark())
    assert flow.on_the_way(10.0) == 0
    for _ in range(20):
        flow.mark()
    assert flow.on_the_way(10.01) == 20
    assert flow.on_the_way(10.0 + module._SILENCE_S) == 20
    assert flow.on_the_way(10.02 + module._SILENCE_S) == 0
    last = flow.mark()
    assert flow.on_the_way(10.03 + module._SILENCE_S) == 1
    report.handled(last)
    assert flow.on_the_way(10.03 + module._SILENCE_S) == 0


def test_a_mark_that_somebody_made_up_writes_nowhere(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"12345678")
    with victim.open("r+b") as file:
        FlowReport().handled((os.getpid(), file.fileno(), 1))
        FlowReport().handled((os.getpid(), 1 << 20, 1))
    assert victim.read_bytes() == b"12345678"


@pytest.mark.parametrize("number", [1 << 40, -1])
def test_a_number_that_was_never_sent_stops_nothing(number: int) -> None:
    flow, report = Flow(), FlowReport()
    pid, descriptor, _ = flow.mark()
    report.handled((pid, descriptor, number))
    assert flow.on_the_way(0.0) <= 1
