"""Settings of the gateway."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from deepseek_triton.arguments import label
from deepseek_triton.errors import ConfigError

_ADDRESS = re.compile(r"\S*[^\s:,]:[0-9]{1,5}")


@dataclass(frozen=True)
class GatewayOptions:
    """How one gateway runs. Raises ConfigError for values that cannot be meant."""

    engine_dir: Path
    servers: tuple[str, ...] = ("127.0.0.1:8001",)  # gRPC addresses
    host: str = "127.0.0.1"  # 0.0.0.0 lets other machines in
    port: int = 8080
    model_name: str = ""  # empty: that of the checkpoint
    chat_template: Path | None = None  # in place of the checkpoint's own
    key_file: Path | None = None  # None: no key is asked for
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    timeout_s: float = 600.0  # of one request, from its arrival to its end
    body_timeout_s: float = 30.0  # for a client to send its request
    exit_timeout_s: float = 10.0  # for requests in flight when stopped, before they are ended

    def __post_init__(self) -> None:
        """Check the values."""
        for server in self.servers or ("",):
            port = int(server.rpartition(":")[2]) if _ADDRESS.fullmatch(server) else 0
            if not 1 <= port <= 65535 or "/" in server:
                raise ConfigError(
                    f"{label('--triton')}: {server!r} is not HOST:PORT of a server's gRPC service; "
                    "make gateway takes TRITON=HOST:PORT, or GRPC_PORT=PORT for this machine"
                )
        if len(set(self.servers)) != len(self.servers):
            raise ConfigError(f"{label('--triton')}: a server is given twice")
        if not self.host:
            raise ConfigError(f"{label('--gateway-host')}: empty; give an address like 127.0.0.1")
        for name, value in (
            ("--max-body-bytes", self.max_body_bytes),
            ("--timeout", self.timeout_s),
            ("--body-timeout", self.body_timeout_s),
        ):
            if not value > 0:
                raise ConfigError(f"{name}: {value} is not positive")
        if not 0 <= self.exit_timeout_s < math.inf:
            raise ConfigError(f"--exit-timeout: {self.exit_timeout_s:g} must be 0 or more seconds")
