"""What the whole server adds to the engine: per token at one stream, in throughput at sixteen.

The same requests go, in turns, to the engine in a process of its own and to tritonserver over
gRPC: prompts of about 128 tokens, 128 greedy tokens each, all sent at once. The client runs on
the same cores as the server. Models: perf/reference_model.py, and at one stream a small one too.

    python perf/bench_serving.py           # writes perf/results/serving_overhead.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_engine import CACHE, reference_engine
from record import save_result

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "client"))

STREAMS = (1, 16)
OUTPUT_TOKENS = 128
PROMPT_CHARACTERS = 300  # about 128 tokens of the random checkpoint's tokenizer


def prompt(index: int) -> str:
    """Text of request `index`; no two begin alike."""
    words = (f"{index} sea, {index * 7} ships and {i} more " for i in range(100))
    return "".join(words)[:PROMPT_CHARACTERS]


@dataclass
class Stream:
    """When a request's first and newest tokens came (time.perf_counter()), and how many did."""

    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    def take(self, tokens: int) -> None:
        """Count `tokens` that came now."""
        if tokens:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.tokens += tokens


def summarize(started: float, streams: Sequence[Stream]) -> dict[str, float]:
    """From the tokens of every request to tokens/s and seconds between tokens."""
    tokens = sum(stream.tokens for stream in streams)
    between = sum(stream.last - stream.first for stream in streams) / (tokens - len(streams))
    return {
        "tokens": tokens,
        "tokens_per_s": tokens / (max(stream.last for stream in streams) - started),
        "between_tokens_s": between,
        "first_token_s": statistics.median(stream.first - started for stream in streams),
    }


def measure_engine(engine_dir: Path, streams: int) -> dict[str, float]:
    """Run the requests on EngineLoop, in this process, without Triton."""
    from deepseek_triton.engine.loop import EngineLoop
    from deepseek_triton.request import Request, RequestKey, TokenOutput
    from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
    from deepseek_triton.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(engine_dir)
    prompts = [tuple(tokenizer.encode(prompt(i))) for i in range(streams)]
    runner = OnnxRuntimeRunner.load(engine_dir, num_blocks=512)
    ended = threading.Semaphore(0)
    with EngineLoop(runner) as engine:
        for warm_up in (True, False):
            measured = [Stream() for _ in prompts]
            started = time.perf_counter()
            for index, ids in enumerate(prompts):

                def take(output: TokenOutput, stream: Stream = measured[index]) -> None:
                    stream.take(len(output.token_ids))
                    if output.finish_reason is not None:
                        ended.release()

                tokens = 8 if warm_up else OUTPUT_TOKENS
                engine.submit(Request(RequestKey(f"{index}"), ids, tokens), take)
            for _ in prompts:
                ended.acquire()
    return {**summarize(started, measured), "prompt_tokens": len(prompts[0])}


def measure_server(grpc_url: str, streams: int) -> dict[str, float]:
    """Send the requests over gRPC, each on a stream of its own."""
    from grpc_stream import stream_grpc

    measured = [Stream() for _ in range(streams)]

    def consume(index: int) -> None:
        chunks = stream_grpc(
            prompt(index),
            url=grpc_url,
            max_tokens=OUTPUT_TOKENS,
            end_id=-1,
            outputs=("text_output", "num_output_tokens"),
            return_num_output_tokens=True,
        )
        for chunk in chunks:  # one may hold several tokens
            reported = int(chunk.outputs["num_output_tokens"].flat[0])
            measured[index].take(reported - measured[index].tokens)

    threads = [threading.Thread(target=consume, args=(index,)) for index in range(streams)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return summarize(started, measured)


def worker(side: str, where: str, streams: int) -> dict[str, float]:
    """Measure one side in a process of its own."""
    command = [sys.executable, __file__, "--worker", side, where, str(streams)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(rounds: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """Medians over the rounds, their ratio and the time added to each token."""

    def median(side: str, key: str) -> float:
        return statistics.median(r[side][key] for r in rounds)

    added = median("server", "between_tokens_s") - median("engine", "between_tokens_s")
    return {
        "engine_tokens_per_s": round(median("engine", "tokens_per_s"), 1),
        "server_tokens_per_s": round(median("server", "tokens_per_s"), 1),
        "throughput_ratio": round(
            median("server", "tokens_per_s") / median("engine", "tokens_per_s"), 3
        ),
        "added_between_tokens_ms": round(added * 1e3, 3),
    }


def main() -> None:
    """Run the rounds, print a table and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", nargs=3, metavar=("SIDE", "WHERE", "STREAMS"))
    arguments = parser.parse_args()
    if arguments.worker:
        side, where, streams = arguments.worker
        if side == "engine":
            print(json.dumps(measure_engine(Path(where), int(streams))))
        else:
            print(json.dumps(measure_server(where, int(streams))))
        return
    _, reference = reference_engine()
    measured = {
        "small_model": measure_model(small_engine(), (1,), arguments.rounds),
        "reference_model": measure_model(reference, STREAMS, arguments.rounds),
    }
    print(save_result("serving_overhead", measured))


def measure_model(engine_dir: Path, stream_counts: Sequence[int], rounds: int) -> dict[str, Any]:
    """Serve one engine and compare, for each number of streams."""
    from deepseek_triton.server import ServerOptions, running_server

    options = ServerOptions(engine_dir=engine_dir, http_port=0, grpc_port=0, metrics_port=0)
    measured: dict[str, Any] = {}
    with running_server(options, log_path=CACHE / "bench_serving.log") as server:
        for streams in stream_counts:
            worker("server", server.grpc_url, streams)  # warm-up
            results = [
                {
                    "engine": worker("engine", str(engine_dir), streams),
                    "server": worker("server", server.grpc_url, streams),
                }
                for _ in range(rounds)
            ]
            measured[f"streams_{streams}"] = {**compare(results), "rounds": results}
            print(f"{engine_dir.name}, {streams} streams: {compare(results)}", flush=True)
    return measured


def small_engine() -> Path:
    """Build the engine of a small random checkpoint: its steps leave the cores to the server."""
    from deepseek_triton.checkpoint.presets import preset_config
    from deepseek_triton.checkpoint.random import write_random_checkpoint
    from deepseek_triton.server.engine_cache import ensure_engine

    checkpoint = write_random_checkpoint(CACHE / "small", preset_config("v2-lite"))
    ensure_engine(checkpoint, CACHE / "small-engine")
    return CACHE / "small-engine"


if __name__ == "__main__":
    main()
