"""Settings of the gateway."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from deepseek_triton.errors import ConfigError


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
        if not self.servers or not all(":" in server for server in self.servers):
            raise ConfigError("--triton: give HOST:PORT of at least one server's gRPC service")
        if len(set(self.servers)) != len(self.servers):
            raise ConfigError("--triton: a server is given twice")
        for name, value in (
            ("--max-body-bytes", self.max_body_bytes),
            ("--timeout", self.timeout_s),
            ("--body-timeout", self.body_timeout_s),
        ):
            if not value > 0:
                raise ConfigError(f"{name}: {value} is not positive")
        if not 0 <= self.exit_timeout_s < math.inf:
            raise ConfigError(f"--exit-timeout: {self.exit_timeout_s:g} must be 0 or more seconds")
