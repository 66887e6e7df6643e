from __future__ import annotations

import socket

import pytest

from deepseek_triton.errors import ServerError
from deepseek_triton.server.ports import resolve_ports

HOST = "127.0.0.1"


def test_zeros_become_different_free_ports_and_others_stay() -> None:
    ports = resolve_ports(HOST, {"--http-port": 0, "--grpc-port": 0, "--metrics-port": 0})
    assert len(set(ports.values())) == 3
    assert resolve_ports(HOST, ports) == ports


@pytest.mark.parametrize("listener", [HOST, "0.0.0.0"])
def test_a_port_in_use_names_port_and_setting(listener: str) -> None:
    with socket.create_server((listener, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} .* in use.*GRPC_PORT .--grpc-port"):
            resolve_ports(HOST, {"--http-port": 0, "--grpc-port": port})


def test_one_port_for_two_services_is_refused() -> None:
    with pytest.raises(ServerError, match=r"\(--http-port\) and .*\(--grpc-port\) are both 18999"):
        resolve_ports(HOST, {"--http-port": 18999, "--grpc-port": 18999})


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(ServerError, match=rf"HTTP_PORT \(--http-port\): {port} .* 1 to 65535"):
        resolve_ports(HOST, {"--http-port": port})


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ServerError, match=r"HOST \(--host\): '192.0.2.1'"):
        resolve_ports("192.0.2.1", {"--http-port": 0})
