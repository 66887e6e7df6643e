"""Starting the gateway: what it says, when, and which setting an error names."""

from __future__ import annotations

import logging
import shutil
import socket
import threading
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from deepseek_triton.errors import ConfigError, EngineMismatchError, TokenizerError
from deepseek_triton.gateway.config import GatewayOptions
from deepseek_triton.gateway.served_model import ServedModel
from deepseek_triton.gateway.serving import GatewayServer, make_server
from tests.unit.gateway.fakes import FOLDER, MODEL


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("deepseek_triton"), "propagate", True)
    caplog.set_level(logging.INFO, "deepseek_triton")


def gateway(host: str, port: int = 0) -> GatewayServer:
    return make_server(GatewayOptions(FOLDER, ("127.0.0.1:9",), host, port), MODEL)


def test_it_says_that_it_listens_when_it_does(caplog: pytest.LogCaptureFixture) -> None:
    server, answers = gateway("127.0.0.1"), list[bytes]()

    def ask() -> None:
        try:
            deadline = time.monotonic() + 30.0
            said: list[str] = []
            while not said and time.monotonic() < deadline:  # it is said a moment after the start
                time.sleep(0.01)
                said = [m for m in caplog.messages if m.startswith("listening on http")]
                assert server.started or not said
            url = said[0].split()[-1]
            with urlopen(url.removesuffix("/v1") + "/health") as answer:
                answers.append(answer.read())
        finally:
            server.should_exit = True

    asking = threading.Thread(target=ask)
    asking.start()
    server.run()
    asking.join()
    assert answers == [b'{"status":"ok"}']


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_of_another_machine_is_refused_and_nothing_said_before(
    caplog: pytest.LogCaptureFixture, host: str
) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on .*; .* HOST \(--gateway-host\) or"):
        gateway(host).run()
    assert not caplog.messages


def test_a_port_that_is_taken_is_refused_in_one_message(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: .* in use; .*GATEWAY_PORT"):
            gateway("127.0.0.1", port).run()
    assert not caplog.messages  # uvicorn's bare one


def test_what_is_no_engine_directory_is_told_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(EngineMismatchError, match=r"^ENGINE \(--engine\): .*make engine"):
        ServedModel.load(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(
        EngineMismatchError, match=r"^ENGINE \(--engine\): .*rebuild it: make engine"
    ):
        ServedModel.load(tmp_path)


def test_a_chat_template_that_cannot_be_read_is_told_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"^--chat-template: .*none\.jinja"):
        ServedModel.load(tmp_path, chat_template=tmp_path / "none.jinja")
    shutil.copyfile(FOLDER / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(TokenizerError, match=r"^ENGINE \(--engine\): .*chat_template\.jinja"):
        ServedModel.load(tmp_path)


def test_an_address_that_is_none_of_a_server_is_told_what_make_takes() -> None:
    with pytest.raises(ConfigError, match=r"'x:y' is not .*TRITON=HOST:PORT, or GRPC_PORT=PORT"):
        GatewayOptions(FOLDER, ("x:y",))
