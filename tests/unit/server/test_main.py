from __future__ import annotations

from pathlib import Path

import pytest

from deepseek_triton.server.__main__ import main, parse_arguments


def test_empty_engine_and_checkpoint_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--engine", "", "--checkpoint", ""])
    assert caught.value.code == 2
    assert "ENGINE=dir" in capsys.readouterr().err


def test_the_default_address_is_this_machine_alone() -> None:
    assert parse_arguments(["--engine", "e"]).host == "127.0.0.1"


def test_arguments_after_two_dashes_go_to_tritonserver() -> None:
    parsed = parse_arguments(["--engine", "e", "--", "--trace-config=level=TIMESTAMPS"])
    assert parsed.extra_args == ["--trace-config=level=TIMESTAMPS"]


def test_a_failure_is_one_message_and_status_1(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepseek_triton.server.__main__.configure_logging", lambda: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    arguments = ["--engine", "e", "--model-repository", f"{tmp_path}"]
    assert main(arguments) == 1
    assert "--model-repository" in caplog.text
    assert "Traceback" not in caplog.text
