"""Command lines: what arguments may be, and what errors call them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from deepseek_triton.arguments import ArgumentParser, choice, label, seconds, whole_number

MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"


def test_every_option_that_a_recipe_sets_is_known_by_its_variable() -> None:
    recipes = MAKEFILE.read_text(encoding="utf-8")
    pairs = re.findall(r'(--[a-z0-9-]+) "\$\$\{?([A-Z][A-Z0-9_]*)', recipes)
    assert len(pairs) > 30
    for option, variable in pairs:
        assert label(option) == f"{variable} ({option})"
    assert label("--windows") == "--windows"


def test_an_error_is_one_line_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    parser.add_argument("--group", type=choice("32", "64"))
    parser.add_argument("--windows", type=whole_number(1))
    for arguments, line in (
        (["--group", "7"], "error: GROUP (--group): '7' is not allowed; it must be 32 or 64\n"),
        (["--windows", "x"], "error: --windows: 'x' is not allowed; it must be a whole number of "
            "at least 1\n"),
        (["--other"], "error: unrecognized arguments: --other\n"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as caught:
            parser.parse_args(arguments)
        assert (caught.value.code, capsys.readouterr().err) == (2, line)


@pytest.mark.parametrize("text", ["", "x", "1.0", "1_0", "-1", "11", "9" * 5000, "١"])
def test_whole_numbers_outside_are_refused(text: str) -> None:
    assert whole_number(0, 10)(" 10 ") == 10
    with pytest.raises(argparse.ArgumentTypeError, match="from 0 to 10"):
        whole_number(0, 10)(text)


@pytest.mark.parametrize("text", ["", "x", "-1", "nan", "inf"])
def test_times_are_finite_and_not_negative(text: str) -> None:
    assert seconds("0.5") == 0.5
    with pytest.raises(argparse.ArgumentTypeError, match="seconds"):
        seconds(text)
