"""Find, start, watch and stop tritonserver."""

from __future__ import annotations

from deepseek_triton.server.launcher import RunningServer, running_server
from deepseek_triton.server.options import ServerOptions

__all__ = ["RunningServer", "ServerOptions", "running_server"]
