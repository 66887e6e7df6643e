"""What tritonserver adds to the cuda engine: tokens per second at 1, 8 and 64 streams.

The same requests go, in turns, to the engine in a process of its own and to a real tritonserver
over gRPC: random prompts of about 128 tokens, 256 greedy tokens each, all sent at once. Under
sustained load each of 64 streams sends eight requests, the next when one has ended, of 128 to 384
tokens, so that prompts and tokens mix. Clients are several processes, so that they are not what is
measured.

    python perf/bench_gpu_serving.py                   # makes a DeepSeek-V2-Lite of random weights
    python perf/bench_gpu_serving.py --engine <folder> # an engine built with TARGET=cuda
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench_serving import Stream, prompt, summarize
from record import save_result

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "client"))
sys.path.insert(0, str(Path(__file__).parent / "gpu"))

STREAMS = (1, 8, 64)
OUTPUT_TOKENS = 256
WARM_UP_TOKENS = 16
STREAMS_PER_CLIENT = 8
SUSTAINED = "sustained"
SUSTAINED_STREAMS, ROUNDS = 64, 8
SETTLE_S = 0.4  # until the engine's metrics are up to date
COUNTERS = (
    ("queue_us", 'nv_inference_queue_duration_us{model="postprocessing"'),
    ("responses", 'nv_inference_request_success{model="postprocessing"'),
    ("steps", "deepseek_triton_steps_total"),
    ("step_s", "deepseek_triton_step_seconds_total"),
    ("runner_s", "deepseek_triton_runner_seconds_total"),
)
SETTINGS = {
    "DEEPSEEK_TRITON_MAX_BATCH_SIZE": "64",
    "DEEPSEEK_TRITON_MAX_TOKENS_PER_STEP": "8192",
    "DEEPSEEK_TRITON_MAX_CONTEXT_LEN": "2048",
    "DEEPSEEK_TRITON_KV_CACHE_NUM_BLOCKS": "1024",
}


@dataclass(frozen=True)
class Load:
    """Requests: each of `streams` sends `rounds`, one after the other, of `tokens` tokens each.

    Of several rounds the lengths differ, by half at most.
    """

    streams: int
    tokens: int
    rounds: int = 1

    def request(self, stream: int, turn: int) -> tuple[str, int]:
        """Return the prompt and the number of tokens of a stream's request `turn`."""
        tokens = self.tokens
        if self.rounds > 1:
            tokens += (stream * 37 + turn * 101) % (self.tokens + 1) - self.tokens // 2
        return prompt(stream + turn * self.streams), tokens


def loads(stream_counts: Sequence[int]) -> dict[str, Load]:
    """Return what is measured, under its name in the result."""
    named = {str(streams): Load(streams, OUTPUT_TOKENS) for streams in stream_counts}
    return named | {SUSTAINED: Load(SUSTAINED_STREAMS, OUTPUT_TOKENS, ROUNDS)}


def engine_worker(engine_dir: Path, stream_counts: Sequence[int]) -> None:
    """Measure EngineLoop in this process at each number of streams; print JSON."""
    from deepseek_triton.backend.opening import open_engine
    from deepseek_triton.config import EngineConfig
    from deepseek_triton.text.tokenizer import Tokenizer

    started = time.perf_counter()
    config = EngineConfig.from_parameters(
        {"engine_dir": str(engine_dir)}, {**os.environ, **SETTINGS}
    )
    engine, _ = open_engine(config)
    measured: dict[str, Any] = {"load_s": time.perf_counter() - started}
    tokenizer = Tokenizer.load(engine_dir)
    for name, load in loads(stream_counts).items():
        _run_engine(engine, tokenizer, replace(load, tokens=WARM_UP_TOKENS, rounds=1))
        measured[name] = _run_engine(engine, tokenizer, load)
    print(json.dumps(measured))
    engine.close()


def _run_engine(engine: Any, tokenizer: Any, load: Load) -> dict[str, float]:
    from deepseek_triton.request import Request, RequestKey, TokenOutput

    measured = [Stream() for _ in range(load.streams)]
    ended = threading.Semaphore(0)
    requests = [
        [
            Request(RequestKey(f"{load}-{stream}-{turn}"), tuple(tokenizer.encode(text)), tokens)
            for turn in range(load.rounds)
            for text, tokens in [load.request(stream, turn)]
        ]
        for stream in range(load.streams)
    ]

    def send(stream: int, turn: int) -> None:
        def take(output: TokenOutput) -> None:
            measured[stream].take(len(output.token_ids))
            if output.finish_reason is None:
                return
            if turn + 1 < load.rounds:
                send(stream, turn + 1)
            else:
                ended.release()

        engine.submit(requests[stream][turn], take)

    before = engine.stats()
    started = time.perf_counter()
    for stream in range(load.streams):
        send(stream, 0)
    for _ in range(load.streams):
        ended.acquire()
    after = engine.stats()
    names = ("steps_total", "step_seconds_total", "runner_seconds_total")
    counted = (getattr(after, name) - getattr(before, name) for name in names)
    return {**summarize(started, measured), **per_step(*counted)}


def per_step(steps: float, step_s: float, runner_s: float) -> dict[str, float]:
    """Return the number of steps and how long they took on average, in all and in the runner."""
    return {"steps": steps, "step_s": step_s / steps, "runner_s": runner_s / steps}


def client_worker(url: str, first: int, streams: int, load: Load) -> None:
    """Be the load's streams first … first + streams − 1; print JSON.

    A response may hold several tokens, so their number is what the server reports at the end.
    """
    from grpc_stream import stream_grpc

    results: list[dict[str, Any]] = [{} for _ in range(streams)]
    input("ready\n")  # the parent starts all clients at once

    def consume(index: int) -> None:
        tokens, firsts, gaps, last = 0, [], [], 0.0
        for turn in range(load.rounds):
            text, wanted = load.request(first + index, turn)
            count, times = 0, []
            chunks = stream_grpc(
                text,
                url=url,
                max_tokens=wanted,
                end_id=-1,
                outputs=("text_output", "num_output_tokens"),
                return_num_output_tokens=True,
            )
            for chunk in chunks:
                times.append(time.time())
                reported = chunk.outputs.get("num_output_tokens")
                count = count if reported is None else int(reported.flat[0])
            tokens += count
            gaps += [b - a for a, b in zip(times, times[1:], strict=False)]
            firsts.append(times[0])
            last = times[-1]
        results[index] = {"tokens": tokens, "first": firsts[0], "last": last, "gaps": gaps}

    threads = [threading.Thread(target=consume, args=(i,)) for i in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(results))


def counters(metrics_url: str) -> dict[str, float]:
    """Return what the server has counted, under the names of COUNTERS."""
    time.sleep(SETTLE_S)
    with urllib.request.urlopen(metrics_url, timeout=10) as response:
        text = response.read().decode()
    found = {name: re.search(rf"^{re.escape(key)}.* (\S+)$", text, re.M) for name, key in COUNTERS}
    return {name: 0.0 if match is None else float(match[1]) for name, match in found.items()}


def measure_server(url: str, metrics_url: str, load: Load) -> dict[str, Any]:
    """Run a load from several client processes."""
    clients = []
    for first in range(0, load.streams, STREAMS_PER_CLIENT):
        count = min(STREAMS_PER_CLIENT, load.streams - first)
        command = [sys.executable, __file__, "--client", url, str(first), str(count)]
        command += [str(load.streams), str(load.tokens), str(load.rounds)]
        clients.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
    for client in clients:
        assert client.stdin is not None and client.stdout is not None
        client.stdout.readline()
    before = counters(metrics_url)
    started = time.time()
    for client in clients:
        client.stdin.write("go\n")  # type: ignore[union-attr]
        client.stdin.flush()  # type: ignore[union-attr]
    outputs = [client.communicate()[0] for client in clients]
    results = [r for output in outputs for r in json.loads(output.splitlines()[-1])]
    total = sum(r["tokens"] for r in results)
    seconds = max(r["last"] for r in results) - started
    gaps = sorted(gap for r in results for gap in r["gaps"])
    counted = {name: value - before[name] for name, value in counters(metrics_url).items()}
    return {
        "tokens": total,
        "responses": len(gaps) + len(results),
        "tokens_per_s": total / seconds,
        "first_token_s": sorted(r["first"] - started for r in results)[len(results) // 2],
        "last_first_token_s": max(r["first"] for r in results) - started,
        "gap_median_s": gaps[len(gaps) // 2],
        "gap_99th_s": gaps[len(gaps) * 99 // 100],
        "queue_of_postprocessing_s": counted["queue_us"] / 1e6 / max(1.0, counted["responses"]),
        **per_step(counted["steps"], counted["step_s"], counted["runner_s"]),
    }


def serve(engine_dir: Path, stream_counts: Sequence[int]) -> dict[str, Any]:
    """Measure a tritonserver that serves `engine_dir`."""
    from deepseek_triton.server import ServerOptions, running_server

    options = ServerOptions(
        engine_dir=engine_dir, http_port=0, grpc_port=0, metrics_port=0, env=SETTINGS
    )
    log = Path(os.environ.get("OUT", tempfile.gettempdir())) / "gpu_serving_server.log"
    started = time.perf_counter()
    with running_server(options, log_path=log) as server:
        measured: dict[str, Any] = {"start_s": time.perf_counter() - started}
        urls = server.grpc_url, server.metrics_url
        for name, load in loads(stream_counts).items():
            measure_server(*urls, replace(load, tokens=WARM_UP_TOKENS, rounds=1))
            measured[name] = measure_server(*urls, load)
            print(f"  server, {name} streams: {measured[name]}", flush=True)
    return measured


def main() -> None:
    """Make the engine if need be, measure both sides, print and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=Path, help="engine directory; default: a random one")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/bench_gpu_serving"))
    parser.add_argument("--layers", type=int, default=27, help="of the random model")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--server-only", action="store_true", help="do not measure the engine")
    parser.add_argument("--engine-worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--client", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine_worker:
        engine_worker(arguments.engine_worker, arguments.streams)
        return
    if arguments.client:
        url, (first, streams, *load) = arguments.client[0], map(int, arguments.client[1:])
        client_worker(url, first, streams, Load(*load))
        return
    measured: dict[str, Any] = {}
    engine_dir = arguments.engine
    if engine_dir is None:
        from random_engine import write_random_engine
        from random_model import V2_LITE, make_spec

        engine_dir = arguments.work / "engine"
        spec = make_spec(V2_LITE, num_hidden_layers=arguments.layers)
        measured["made"] = write_random_engine(engine_dir, spec)
        print(f"  made {engine_dir}: {measured['made']}", flush=True)
    if not arguments.server_only:
        command = [sys.executable, __file__, "--engine-worker", str(engine_dir)]
        command += ["--streams", *map(str, arguments.streams)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        measured["engine"] = json.loads(done.stdout.splitlines()[-1])
        print(f"  engine: {measured['engine']}", flush=True)
    measured["server"] = serve(engine_dir, arguments.streams)
    for name in loads(arguments.streams) if "engine" in measured else ():
        ours, engine = (measured[s][name]["tokens_per_s"] for s in ("server", "engine"))
        print(f"  {name} streams: {ours:.0f} of {engine:.0f} tokens/s ({ours / engine:.1%})")
    print(save_result("gpu_serving", measured))


if __name__ == "__main__":
    main()
