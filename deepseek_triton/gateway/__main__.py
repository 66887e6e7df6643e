"""Run the gateway in the foreground: python -m deepseek_triton.gateway."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from deepseek_triton.arguments import ArgumentParser, seconds, whole_number
from deepseek_triton.errors import DeepseekTritonError
from deepseek_triton.gateway.config import GatewayOptions
from deepseek_triton.gateway.keys import new_key
from deepseek_triton.gateway.served_model import ServedModel
from deepseek_triton.gateway.serving import interrupt_on_signals, make_server
from deepseek_triton.log import configure_logging

logger = logging.getLogger("deepseek_triton.gateway")


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the gateway's options but for engine and servers; an empty one counts as absent."""
    defaults = GatewayOptions(Path())
    add = parser.add_argument
    add("--gateway-host", default=defaults.host, help="address to listen on; 0.0.0.0 lets other "
        "machines in (default: %(default)s)")  # fmt: skip
    add("--gateway-port", type=whole_number(0, 65535), default=defaults.port,
        help="(default: %(default)s)")  # fmt: skip
    add("--model-name", default="", help="the model's name (default: that of the checkpoint)")
    add("--chat-template", default="", metavar="FILE", help="in place of the checkpoint's own")
    add("--api-keys", default="", metavar="FILE", help="ask for API keys; see --new-key")
    add("--cors-origin", action="append", default=[], metavar="URL",
        help="let pages of this origin in; may be repeated")  # fmt: skip
    add("--max-body-bytes", type=whole_number(1), default=defaults.max_body_bytes, metavar="N",
        help="longest request (default: %(default)s)")  # fmt: skip
    add("--timeout", type=seconds, default=defaults.timeout_s, metavar="SECONDS",
        help="of one request (default: %(default)g)")  # fmt: skip
    add("--body-timeout", type=seconds, default=defaults.body_timeout_s, metavar="SECONDS",
        help="for a client to send its request (default: %(default)g)")  # fmt: skip


def options_from(
    parsed: argparse.Namespace, engine_dir: Path, servers: Sequence[str]
) -> GatewayOptions:
    """Return the options of a command line that has `add_arguments` and --exit-timeout.

    Raises ConfigError.
    """
    return GatewayOptions(
        engine_dir=engine_dir,
        servers=tuple(servers),
        host=parsed.gateway_host,
        port=parsed.gateway_port,
        model_name=parsed.model_name,
        chat_template=Path(parsed.chat_template) if parsed.chat_template else None,
        key_file=Path(parsed.api_keys) if parsed.api_keys else None,
        cors_origins=tuple(filter(None, parsed.cors_origin)),
        max_body_bytes=parsed.max_body_bytes,
        timeout_s=parsed.timeout,
        body_timeout_s=parsed.body_timeout,
        exit_timeout_s=parsed.exit_timeout,
    )


def load_model(options: GatewayOptions) -> ServedModel:
    """Read the engine directory as `options` say; raises a DeepseekTritonError."""
    return ServedModel.load(
        options.engine_dir, name=options.model_name, chat_template=options.chat_template
    )


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 after a stop by signal, 1 after a failure."""
    parser = ArgumentParser(
        prog="python -m deepseek_triton.gateway",
        description="OpenAI's HTTP API in front of Triton servers.",
    )
    parser.add_argument("--engine", default="", help="engine directory that the servers serve")
    parser.add_argument(
        "--triton",
        default=",".join(GatewayOptions(Path()).servers),
        metavar="HOST:PORT,…",
        help="gRPC addresses of the servers (default: %(default)s)",
    )
    parser.add_argument("--new-key", metavar="NAME", help="print a new API key and its entry")
    parser.add_argument(
        "--exit-timeout",
        type=seconds,
        default=GatewayOptions(Path()).exit_timeout_s,
        metavar="SECONDS",
        help="for requests in flight when stopped (default: %(default)g)",
    )
    add_arguments(parser)
    parsed = parser.parse_args(arguments)
    if parsed.new_key:
        key, entry = new_key(parsed.new_key)
        sys.stdout.write(f"key, to hand over: {key}\nentry, for the file: {json.dumps(entry)}\n")
        return 0
    if not parsed.engine:
        parser.error("give --engine DIR (make gateway ENGINE=dir)")
    configure_logging()
    interrupt_on_signals()
    try:
        options = options_from(parsed, Path(parsed.engine), parsed.triton.split(","))
        make_server(options, load_model(options)).run()
    except KeyboardInterrupt:
        logger.info("stopped")
    except DeepseekTritonError as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
