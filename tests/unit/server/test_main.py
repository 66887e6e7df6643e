from __future__ import annotations

from pathlib import Path

import pytest

from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
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
    arguments = ["--engine", f"{tmp_path / 'e'}", "--model-repository", f"{tmp_path}"]
    assert main(arguments) == 1
    assert "no such folder" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_folder_of_the_other_kind_is_told_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepseek_triton.server.__main__.configure_logging", lambda: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text("{}")
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "manifest.json").write_text("{}")
    assert main(["--engine", f"{tmp_path / 'c'}"]) == 1
    assert f"use CHECKPOINT={tmp_path / 'c'}" in caplog.text
    assert main(["--checkpoint", f"{tmp_path / 'e'}"]) == 1
    assert f"use ENGINE={tmp_path / 'e'}" in caplog.text


def test_another_engine_is_not_replaced_by_a_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepseek_triton.server.__main__.configure_logging", lambda: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    checkpoint, engine = tmp_path / "checkpoint", tmp_path / "engine"
    write_random_checkpoint(checkpoint, preset_config("v2-lite"))
    build_engine(checkpoint, engine, precision="bf16")
    before = (engine / "manifest.json").read_bytes()
    assert main(["--engine", str(engine), "--checkpoint", str(checkpoint)]) == 1
    assert "leave out CHECKPOINT to serve it as it is" in caplog.text
    assert (engine / "manifest.json").read_bytes() == before


def test_an_old_engine_beside_a_checkpoint_is_not_said_to_be_servable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepseek_triton.server.__main__.configure_logging", lambda: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    checkpoint, engine = tmp_path / "checkpoint", tmp_path / "engine"
    checkpoint.mkdir()
    engine.mkdir()
    (engine / "manifest.json").write_text('{"format_version": 4, "precision": "bf16"}')
    assert main(["--engine", str(engine), "--checkpoint", str(checkpoint)]) == 1
    assert f"make engine CHECKPOINT=<checkpoint folder> ENGINE={engine} PREC" in caplog.text
    assert "leave out CHECKPOINT" not in caplog.text


def test_an_engine_for_nvidias_container_is_told_so_before_a_server_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepseek_triton.server.__main__.configure_logging", lambda: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    write_random_checkpoint(tmp_path / "checkpoint", preset_config("llama"))
    build_engine(
        tmp_path / "checkpoint", tmp_path / "engine", target="tensorrt_llm", precision="fp16"
    )
    assert main(["--engine", str(tmp_path / "engine")]) == 1
    assert "run build.sh and then serve.sh of this folder" in caplog.text
