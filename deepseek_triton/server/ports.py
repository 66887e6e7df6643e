"""TCP ports: refuse those in use, and find free ones."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Mapping

from deepseek_triton.arguments import label
from deepseek_triton.errors import ServerError

# Below Linux's default range for outgoing connections, one of which could take a port in between.
_FREE_PORTS = range(20000, 32000)


def resolve_ports(host: str, ports: Mapping[str, int]) -> dict[str, int]:
    """Return `ports` (setting → port) with each 0 replaced by a free port.

    Raises:
        ServerError: a port is out of range, given twice or in use; names the setting.
    """
    if not host:
        raise ServerError(f"{label('--host')}: empty; give an address like 127.0.0.1")
    taken: dict[int, str] = {}
    for setting, port in ports.items():
        if not 0 <= port <= 65535:
            raise ServerError(
                f"{label(setting)}: {port} is no port; it must be from 1 to 65535, or 0 for a "
                "free one"
            )
        if port in taken:
            raise ServerError(
                f"{label(taken[port])} and {label(setting)} are both {port}; change one of them"
            )
        if port and not _is_free(host, port):
            raise ServerError(
                f"port {port} on {host} is in use; stop what listens there or choose another "
                f"with {label(setting)}"
            )
        if port:
            taken[port] = setting
    free = (p for p in random.sample(_FREE_PORTS, len(_FREE_PORTS)) if p not in taken)
    resolved = {s: p or next(f for f in free if _is_free(host, f)) for s, p in ports.items()}
    return resolved


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Connections that linger from an earlier server do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except PermissionError:
        raise ServerError(
            f"port {port} may not be opened by this user; take one above 1023"
        ) from None
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ServerError(
                f"{label('--host')}: {host!r} is not an address of this machine ({error})"
            ) from None
        return False
    return True
