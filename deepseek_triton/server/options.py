"""What a user can set about the server process; what the engine reads is in config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import deepseek_triton

ENGINE_DIR_VARIABLE = "DEEPSEEK_TRITON_ENGINE_DIR"
"""Environment variable through which the models learn where their engine is."""


def default_model_repository() -> Path:
    """Return the repository's model_repository/ folder, beside the package."""
    return Path(deepseek_triton.__file__).resolve().parents[1] / "model_repository"


@dataclass(frozen=True)
class ServerOptions:
    """How one tritonserver is started. A port of 0 takes a free one."""

    engine_dir: Path
    model_repository: Path = field(default_factory=default_model_repository)
    host: str = "127.0.0.1"  # 0.0.0.0 lets other machines in
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    log_verbose: int = 0
    ready_timeout_s: float = 600.0  # large engines take minutes to load
    exit_timeout_s: int = 10  # for requests in flight, before they are cut off
    env: Mapping[str, str] = field(default_factory=dict)  # on top of the launcher's own
    extra_args: tuple[str, ...] = ()  # handed to tritonserver as they are

    def model_names(self) -> list[str]:
        """Return the models of the repository, ascending."""
        return sorted(p.parent.name for p in self.model_repository.glob("*/config.pbtxt"))
