from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from perf.record import RESULTS_DIR, ROOT, command_line

MACHINE_PATH = re.compile(r"(?<![\w<./])(/|~|\.\./)\w+")
SCRIPT = str(ROOT / "perf" / "bench_truncation.py")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--rounds", "4"], "--rounds 4"),
        (["--text", "/a/b/held out.xz"], "--text <held out.xz>"),
        (["--text=/a/b/text/"], "--text=<text>"),
        (["--text=/a=b/text"], "--text=<text>"),
        (["--text", "../text"], "--text <text>"),
        (["--text", "~/text"], "--text <text>"),
        (["--text", "/"], "--text <folder>"),
        (["--text", "models/demo"], "--text models/demo"),
        (["--text", str(ROOT / "models" / "demo")], "--text models/demo"),
        (["--name", "a b"], "--name 'a b'"),
    ],
)
def test_a_recorded_command_has_no_place_of_the_machine(arguments: list[str], shown: str) -> None:
    assert command_line([SCRIPT, *arguments]) == f"python perf/bench_truncation.py {shown}"


def commands(value: object) -> list[str]:
    if isinstance(value, list):
        return [found for item in value for found in commands(item)]
    if not isinstance(value, dict):
        return []
    own = [value["command"]] if isinstance(value.get("command"), str) else []
    return own + [found for item in value.values() for found in commands(item)]


@pytest.mark.parametrize("path", sorted(RESULTS_DIR.glob("*.json")), ids=lambda path: path.stem)
def test_the_commands_on_record_have_none_either(path: Path) -> None:
    found = commands(json.loads(path.read_text(encoding="utf-8")))
    assert not [command for command in found if MACHINE_PATH.search(command)]


def test_what_is_looked_for_is_found() -> None:
    assert commands({"command": "a", "measured": [{"command": "b"}]}) == ["a", "b"]
    assert all(MACHINE_PATH.search(f"x --text{a}") for a in (" /tmp/a", "=/srv/a", " ../a", " ~a"))
