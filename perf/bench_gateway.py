"""What the gateway adds to a direct gRPC client: to the first token, and in throughput.

The same prompts go, in turns, to tritonserver over gRPC and to the gateway in front of it over
HTTP, from clients that keep their connections: one request after the other for the time to the
first token, then 32 streams at the same time. Clients, gateway and server share the same cores.

    python perf/bench_gateway.py           # writes perf/results/gateway_overhead.json
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench_engine import CACHE, reference_engine
from bench_serving import Stream, prompt, small_engine, summarize
from record import save_result

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "client"))

STREAMS = 32
OUTPUT_TOKENS = 64
FIRST_TOKENS = 40  # requests for the time to the first token
READY_TIMEOUT_S = 60.0

Ask = Callable[[str, int], list[float]]
"""Sends a prompt, asks for so many tokens, returns when each response with text came."""


def direct_client(url: str) -> Ask:
    """Return a client of tritonserver that keeps its channel."""
    import tritonclient.grpc as triton
    from grpc_stream import make_input

    client = triton.InferenceServerClient(url)
    outputs = [triton.InferRequestedOutput(name) for name in ("text_output", "finish_reason")]

    def ask(text: str, tokens: int) -> list[float]:
        values = {"text_input": text, "max_tokens": tokens, "stream": True, "end_id": -1}
        inputs = [make_input(*item) for item in values.items()]
        answers: queue.SimpleQueue[tuple[Any, Any, float]] = queue.SimpleQueue()
        client.start_stream(lambda result, error: answers.put((result, error, time.perf_counter())))
        client.async_stream_infer(
            "ensemble", inputs, outputs=outputs, enable_empty_final_response=True
        )
        times = []
        final = False
        while not final:
            result, error, now = answers.get()
            if error is not None:
                raise error
            response = result.get_response()
            final = response.parameters["triton_final_response"].bool_param
            if response.outputs:
                times.append(now)
        client.stop_stream()
        return times

    return ask


def gateway_client(url: str) -> Ask:
    """Return a client of the gateway that keeps its connection."""
    host, model = url.split("/")
    connection = http.client.HTTPConnection(host)
    headers = {"Content-Type": "application/json"}

    def ask(text: str, tokens: int) -> list[float]:
        body = {
            "model": model,
            "prompt": text,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        times = []
        for line in response:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
        if response.status != http.client.OK:
            raise RuntimeError(f"status {response.status}")
        return times

    return ask


CLIENTS = {"direct": direct_client, "gateway": gateway_client}


def first_tokens(ask: Ask) -> dict[str, float]:
    """Ask one request after the other; return the median time to the first token."""
    taken = []
    for index in range(FIRST_TOKENS):
        started = time.perf_counter()
        taken.append(ask(prompt(index)[:64], 2)[0] - started)
    return {"first_token_s": statistics.median(taken[5:])}


def throughput(make: Callable[[str], Ask], url: str, streams: int) -> dict[str, float]:
    """Ask `streams` requests at the same time, each on a connection of its own."""
    asks = [make(url) for _ in range(streams)]

    def run(index: int, tokens: int) -> list[float]:
        return asks[index](prompt(index), tokens)

    with ThreadPoolExecutor(streams) as pool:
        for tokens in (4, OUTPUT_TOKENS):  # the first round opens the connections
            started = time.perf_counter()
            # A request that failed raises here: without it the figures would mean nothing.
            arrivals = list(pool.map(run, range(streams), [tokens] * streams))
    # A response may carry several tokens; every request made exactly OUTPUT_TOKENS.
    measured = [Stream(times[0], times[-1], OUTPUT_TOKENS) for times in arrivals]
    return summarize(started, measured)


def worker(side: str, url: str, streams: int) -> dict[str, float]:
    """Measure one side in a process of its own; 0 streams: the first token."""
    command = [sys.executable, __file__, "--worker", side, url, str(streams)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


@contextlib.contextmanager
def running_gateway(engine_dir: Path, grpc_url: str) -> Iterator[str]:
    """Run the gateway as make gateway does; yield HOST:PORT/MODEL."""
    from deepseek_triton.gateway.served_model import ServedModel
    from deepseek_triton.server.ports import resolve_ports

    port = resolve_ports("127.0.0.1", {"gateway": 0})["gateway"]
    command = [sys.executable, "-m", "deepseek_triton.gateway", "--engine", str(engine_dir)]
    command += ["--triton", grpc_url, "--gateway-port", str(port)]
    with (CACHE / "bench_gateway.log").open("w") as log:
        gateway = subprocess.Popen(command, stderr=log)
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not _answers(port):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the gateway is not ready; see {CACHE}/bench_gateway.log")
            time.sleep(0.1)
        yield f"127.0.0.1:{port}/{ServedModel.load(engine_dir).name}"
    finally:
        gateway.terminate()
        gateway.wait()


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()


def measure(engine_dir: Path, streams: int, rounds: int) -> dict[str, Any]:
    """Serve one engine and measure both sides in turns; 0 streams: the first token."""
    from deepseek_triton.server import ServerOptions, running_server

    options = ServerOptions(
        engine_dir=engine_dir,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        env={"DEEPSEEK_TRITON_MAX_BATCH_SIZE": str(STREAMS)},
    )
    with (
        running_server(options, log_path=CACHE / "bench_gateway_server.log") as server,
        running_gateway(engine_dir, server.grpc_url) as gateway_url,
    ):
        urls = {"direct": server.grpc_url, "gateway": gateway_url}
        for side, url in urls.items():
            worker(side, url, streams)  # warm-up
        results = [
            {side: worker(side, url, streams) for side, url in urls.items()} for _ in range(rounds)
        ]
    key = "tokens_per_s" if streams else "first_token_s"
    direct, gateway = (statistics.median(r[side][key] for r in results) for side in urls)
    summary = (
        {"throughput_ratio": round(gateway / direct, 3)}
        if streams
        else {"added_first_token_ms": round((gateway - direct) * 1e3, 3)}
    )
    print(f"{engine_dir.name}, {streams or 1} streams: {summary}", flush=True)
    return {**summary, f"direct_{key}": direct, f"gateway_{key}": gateway, "rounds": results}


def main() -> None:
    """Run the rounds, print the comparisons and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="the small model alone, not kept")
    parser.add_argument("--worker", nargs=3, metavar=("SIDE", "URL", "STREAMS"))
    arguments = parser.parse_args()
    if arguments.worker:
        side, url, streams = arguments.worker
        make = CLIENTS[side]
        found = throughput(make, url, int(streams)) if int(streams) else first_tokens(make(url))
        print(json.dumps(found))
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    small = small_engine()
    measured = {"small_model_first_token": measure(small, 0, arguments.rounds)}
    if arguments.small:
        measure(small, STREAMS, arguments.rounds)
        return
    _, reference = reference_engine()
    measured["reference_model_32_streams"] = measure(reference, STREAMS, arguments.rounds)
    print(save_result("gateway_overhead", measured))


if __name__ == "__main__":
    main()
