"""The gateway beside tritonserver: one process starts, watches and stops both.

The gateway runs in the launcher's own process, so none can outlive the other: if tritonserver ends,
the gateway stops and the launcher fails; a signal ends both.
"""

from __future__ import annotations

import argparse
import dataclasses
import threading
from dataclasses import dataclass
from pathlib import Path

from deepseek_triton.arguments import label
from deepseek_triton.errors import ServerError
from deepseek_triton.gateway.__main__ import load_model, options_from
from deepseek_triton.gateway.config import GatewayOptions
from deepseek_triton.gateway.keys import read_key_file
from deepseek_triton.gateway.served_model import ServedModel
from deepseek_triton.gateway.serving import make_server
from deepseek_triton.server.launcher import RunningServer
from deepseek_triton.server.ports import resolve_ports


@dataclass(frozen=True)
class Gateway:
    """A gateway whose files have been read and whose port is free."""

    options: GatewayOptions
    model: ServedModel

    @classmethod
    def prepare(cls, parsed: argparse.Namespace, engine_dir: Path) -> Gateway:
        """Check all that can be checked before an engine is loaded; raises DeepseekTritonError."""
        options = options_from(parsed, engine_dir, GatewayOptions(Path()).servers)
        for setting in ("--http-port", "--grpc-port", "--metrics-port"):
            if options.port and options.port == getattr(parsed, setting[2:].replace("-", "_")):
                raise ServerError(
                    f"{label(setting)} and {label('--gateway-port')} are both {options.port}; "
                    "change one of them"
                )
        port = resolve_ports(options.host, {"--gateway-port": options.port})["--gateway-port"]
        if options.key_file is not None:
            read_key_file(options.key_file)
        return cls(dataclasses.replace(options, port=port), load_model(options))

    def run_beside(self, server: RunningServer) -> None:
        """Serve until interrupted (KeyboardInterrupt) or until `server` ends (ServerError)."""
        options = dataclasses.replace(self.options, servers=(server.grpc_url,))
        http = make_server(options, self.model)
        failures: list[ServerError] = []

        def watch() -> None:
            try:
                server.wait()
            except ServerError as error:
                failures.append(error)
                http.should_exit = True

        threading.Thread(target=watch, name="watch-server", daemon=True).start()
        try:
            http.run()
        except KeyboardInterrupt:
            if failures:
                raise failures[0] from None
            if http.force_exit:  # a second one: nobody waits any more
                server.kill()
            raise
        if failures:
            raise failures[0]
