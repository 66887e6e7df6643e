"""The whole job once: checkpoint, engine, server, a completion over gRPC and one over HTTP.

Everything is kept in .cache/demo/, so that a second run begins with the server.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "client"))

from grpc_stream import GenerationError as GrpcError  # noqa: E402
from grpc_stream import stream_grpc  # noqa: E402
from http_generate import GenerationError as HttpError  # noqa: E402
from http_generate import generate_stream  # noqa: E402

from deepseek_triton.arguments import ArgumentParser, choice, whole_number  # noqa: E402
from deepseek_triton.checkpoint.presets import PRESETS, preset_config  # noqa: E402
from deepseek_triton.checkpoint.random import write_random_checkpoint  # noqa: E402
from deepseek_triton.errors import DeepseekTritonError  # noqa: E402
from deepseek_triton.server import RunningServer, ServerOptions, running_server  # noqa: E402
from deepseek_triton.server.engine_cache import ensure_engine  # noqa: E402

DEMO_MODEL = ROOT / "models" / "demo"
DEMO_PROMPT = '''def clip(value, lower, upper):
    """Limit a value to the range from lower to upper.

    Parameters
    ----------
'''

Piece = tuple[str, int]  # text; tokens of the whole answer, with the last piece
TOKENS = "num_output_tokens"


def prepare(folder: Path, arch: str) -> Path:
    """Return the demo's engine directory, built if it is not there yet.

    Its checkpoint is the one in models/demo, or for an `arch` a random one made here.
    """
    engine = folder / f"engine-{arch or 'demo'}"
    if arch:
        checkpoint = folder / f"checkpoint-{arch}"
        print(f"1. checkpoint  {_shown(checkpoint)}: {arch}, random weights", flush=True)
        write_random_checkpoint(checkpoint, preset_config(arch), overwrite=True)
    else:
        checkpoint = DEMO_MODEL
        print(
            f"1. checkpoint  {_shown(checkpoint)}: DeepSeek-V3 in small, knows Python", flush=True
        )
    print(f"2. engine      {_shown(engine)}", flush=True)
    built = ensure_engine(checkpoint, engine, draft=not arch)
    print("               built" if built else "               kept from an earlier run")
    return engine


def over_grpc(server: RunningServer, prompt: str, max_tokens: int) -> Iterator[Piece]:
    """Yield the completion as it comes through a gRPC stream."""
    chunks = stream_grpc(
        prompt,
        url=server.grpc_url,
        max_tokens=max_tokens,
        outputs=("text_output", "finish_reason", TOKENS),
        return_num_output_tokens=True,
    )
    for chunk in chunks:
        counts = chunk.outputs.get(TOKENS)  # with the last response
        yield chunk.text, 0 if counts is None else int(counts.flat[0])


def over_http(server: RunningServer, prompt: str, max_tokens: int) -> Iterator[Piece]:
    """Yield the completion as it comes from generate_stream."""
    events = generate_stream(
        prompt, url=server.http_url, max_tokens=max_tokens, return_num_output_tokens=True
    )
    for event in events:
        yield event["text_output"], event.get(TOKENS, 0)


def show(title: str, prompt: str, pieces: Iterable[Piece]) -> None:
    """Print a completion as it arrives, then time to first token and tokens per second."""
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n{title}\n{prompt}{bold}", end="", flush=True)
    start = time.perf_counter()
    arrivals: list[tuple[float, int]] = []
    for text, tokens in pieces:
        arrivals.append((time.perf_counter() - start, tokens))
        print(printable(text), end="", flush=True)
    (first, _), (last, total) = arrivals[0], arrivals[-1]
    rate = f"then {(total - 1) / (last - first):.0f} tokens/s" if last > first else "in one piece"
    print(f"{plain}\n[{total} tokens; the first after {1e3 * first:.0f} ms; {rate}]")


def printable(text: str) -> str:
    """Return `text` without control characters: random weights write them, terminals obey them."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\u00b7" for c in text)


def run(folder: Path, arguments: argparse.Namespace) -> None:
    """Do the whole job; raises the package's and the clients' errors."""
    engine = prepare(folder, arguments.arch)
    log = folder / "server.log"
    print(f"3. server      log in {_shown(log)}", flush=True)
    options = ServerOptions(
        engine,
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        metrics_port=arguments.metrics_port,
        exit_timeout_s=3,
    )
    start = time.perf_counter()
    with running_server(options, log_path=log) as server:
        seconds = time.perf_counter() - start
        print(f"               ready after {seconds:.1f} s")
        print(f"               HTTP {server.http_url}, gRPC {server.grpc_url}")
        request = (server, arguments.prompt, arguments.max_tokens)
        show("4. gRPC stream", arguments.prompt, over_grpc(*request))
        show("5. HTTP generate_stream", arguments.prompt, over_http(*request))
    print("\n6. stopped\n   `make serve CHECKPOINT=dir` serves a checkpoint of your own.")


def main() -> int:
    """Return the exit status."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arch",
        default="",
        type=choice("", *PRESETS),
        help="random weights instead of models/demo",
    )
    parser.add_argument("--prompt", default=DEMO_PROMPT)
    parser.add_argument("--max-tokens", type=whole_number(1), default=128)
    for service in ("http", "grpc", "metrics"):
        parser.add_argument(
            f"--{service}-port",
            type=whole_number(0, 65535),
            default=0,
            help="(default: a free one)",
        )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):  # both take Ctrl-C's path
        signal.signal(number, signal.default_int_handler)
    folder = ROOT / ".cache" / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        run(folder, arguments)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except (DeepseekTritonError, GrpcError, HttpError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    return 0


def _shown(path: Path) -> Path:
    return path.relative_to(ROOT)


if __name__ == "__main__":
    sys.exit(main())
