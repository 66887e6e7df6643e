"""Serve an engine directory or a checkpoint in the foreground: python -m deepseek_triton.server."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from deepseek_triton.arguments import ArgumentParser, seconds, whole_number
from deepseek_triton.build.engine_dir import load_engine_dir
from deepseek_triton.build.manifest import MANIFEST_NAME
from deepseek_triton.build.pipeline import is_current
from deepseek_triton.config import EngineConfig
from deepseek_triton.errors import ConfigError, DeepseekTritonError
from deepseek_triton.gateway.__main__ import add_arguments as add_gateway_arguments
from deepseek_triton.gateway.serving import interrupt_on_signals
from deepseek_triton.log import configure_logging
from deepseek_triton.runner.ort_memory import require_memory
from deepseek_triton.server.engine_cache import cached_engine_path, ensure_engine
from deepseek_triton.server.gateway import Gateway
from deepseek_triton.server.launcher import running_server
from deepseek_triton.server.options import ServerOptions, default_model_repository

logger = logging.getLogger("deepseek_triton.server")


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; an empty --engine or --checkpoint counts as absent."""
    defaults = ServerOptions(Path())
    parser = ArgumentParser(
        prog="python -m deepseek_triton.server",
        description="Serve a DeepSeek engine with tritonserver until SIGINT or SIGTERM.",
        epilog="Arguments after -- go to tritonserver as they are. Settings of the engine are "
        "environment variables DEEPSEEK_TRITON_<SETTING>.",
    )
    add = parser.add_argument
    add("--engine", default="", help="engine directory (make engine)")
    add("--checkpoint", default="", help="checkpoint folder; its engine is built first and kept")
    add("--host", default=defaults.host, help="address to listen on; 0.0.0.0 lets other "
        "machines in (default: %(default)s)")  # fmt: skip
    port = whole_number(0, 65535)
    add("--http-port", type=port, default=defaults.http_port, help="(default: %(default)s)")
    add("--grpc-port", type=port, default=defaults.grpc_port, help="(default: %(default)s)")
    add("--metrics-port", type=port, default=defaults.metrics_port, help="(default: %(default)s)")
    add("--model-repository", type=Path, default=default_model_repository(), metavar="DIR",
        help="(default: %(default)s)")  # fmt: skip
    add(
        "--log-verbose",
        type=whole_number(0),
        default=0,
        help="tritonserver's verbosity (default: 0)",
    )
    add("--ready-timeout", type=seconds, default=defaults.ready_timeout_s, metavar="SECONDS",
        help="for the models to load (default: %(default)g)")  # fmt: skip
    add("--exit-timeout", type=whole_number(0), default=defaults.exit_timeout_s, metavar="SECONDS",
        help="for requests in flight when stopped (default: %(default)s)")  # fmt: skip
    add("--gateway", action="store_true", help="serve OpenAI's HTTP API too")
    add_gateway_arguments(parser.add_argument_group("with --gateway"))
    own, extra = _split(arguments)
    parsed = parser.parse_args(own)
    parsed.extra_args = extra
    if not parsed.engine and not parsed.checkpoint:
        parser.error("give --engine DIR or --checkpoint DIR (make serve ENGINE=dir)")
    return parsed


def serve(parsed: argparse.Namespace) -> None:
    """Serve until interrupted (KeyboardInterrupt) or until the server fails (ServerError)."""
    options = ServerOptions(
        engine_dir=_engine_dir(parsed.engine, parsed.checkpoint),
        model_repository=parsed.model_repository,
        host=parsed.host,
        http_port=parsed.http_port,
        grpc_port=parsed.grpc_port,
        metrics_port=parsed.metrics_port,
        log_verbose=parsed.log_verbose,
        ready_timeout_s=parsed.ready_timeout,
        exit_timeout_s=parsed.exit_timeout,
        extra_args=tuple(parsed.extra_args),
    )
    # The models check all this too, but not before a server has started and read the weights.
    require_memory(load_engine_dir(options.engine_dir, verify_contents=False))
    EngineConfig.from_parameters({"engine_dir": str(options.engine_dir)})
    gateway = Gateway.prepare(parsed, options.engine_dir) if parsed.gateway else None
    with running_server(options) as server:
        logger.info(
            "ready: serving %s; HTTP %s, gRPC %s, metrics %s; Ctrl-C stops it",
            options.engine_dir, server.http_url, server.grpc_url, server.metrics_url,
        )  # fmt: skip
        if gateway is not None:
            gateway.run_beside(server)
        else:
            server.wait()


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 after a stop by signal, 1 after a failure."""
    parsed = parse_arguments(arguments)
    configure_logging()
    interrupt_on_signals()
    try:
        serve(parsed)
    except KeyboardInterrupt:
        logger.info("stopped")
    except DeepseekTritonError as error:
        logger.error("%s", error)
        return 1
    return 0


def _engine_dir(engine: str, checkpoint: str) -> Path:
    """Return the engine directory to serve, built if need be and complete by its manifest.

    The models verify it again, contents too, but not before a server has started.
    """
    if not checkpoint:
        if _kind(Path(engine)) == "checkpoint":
            raise ConfigError(
                f"ENGINE={engine}: this looks like a checkpoint: use CHECKPOINT={engine}"
            )
        manifest = load_engine_dir(Path(engine), verify_contents=False).manifest
        if manifest.target == "tensorrt_llm":
            raise ConfigError(
                f"ENGINE={engine}: made for TensorRT-LLM, which NVIDIA's Triton container serves: "
                "run build.sh and then serve.sh of this folder there (docs/tensorrt-llm.md)"
            )
        return Path(engine)
    if _kind(Path(checkpoint)) == "engine":
        raise ConfigError(
            f"CHECKPOINT={checkpoint}: this looks like an engine directory: use ENGINE={checkpoint}"
        )
    engine_dir = Path(engine) if engine else cached_engine_path(Path(checkpoint))
    if engine and engine_dir.exists() and not is_current(engine_dir, Path(checkpoint)):
        load_engine_dir(engine_dir, verify_contents=False)  # raises for what cannot be served
        raise ConfigError(
            f"ENGINE={engine}: exists, and is not what CHECKPOINT={checkpoint} builds by default: "
            "leave out CHECKPOINT to serve it as it is, or choose another ENGINE"
        )
    ensure_engine(Path(checkpoint), engine_dir)
    return engine_dir


def _kind(folder: Path) -> str:
    """Return "checkpoint", "engine", or "" where the files do not tell."""
    kinds = {"config.json": "checkpoint", MANIFEST_NAME: "engine"}
    found = [kind for name, kind in kinds.items() if (folder / name).is_file()]
    return found[0] if len(found) == 1 else ""


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
