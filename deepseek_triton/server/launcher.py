"""Run one tritonserver as a child: start it, wait until it is ready, stop all of it."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from deepseek_triton.errors import ServerError
from deepseek_triton.server.locate import ServerInstallation, find_server
from deepseek_triton.server.options import ENGINE_DIR_VARIABLE, ServerOptions
from deepseek_triton.server.ports import resolve_ports
from deepseek_triton.server.process_group import end_group, kill_group
from deepseek_triton.server.server_log import LogCopier, failure_reason
from deepseek_triton.server.shared_memory import check_space, new_region_prefix, remove_regions
from deepseek_triton.server.stub_watch import StubWatch
from deepseek_triton.server.watchdog import start_watchdog

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_TELL_S = 10.0  # between two lines that say what is still loading
_STUB_TIMEOUT_S = 300  # for a stub to import its packages from a cold disk
_PORT_SETTINGS = ("--http-port", "--grpc-port", "--metrics-port")


class RunningServer:
    """A tritonserver that this process started. Not thread-safe."""

    def __init__(self, options: ServerOptions, log_path: Path | None) -> None:
        wanted = (options.http_port, options.grpc_port, options.metrics_port)
        self._options = options
        self._ports = resolve_ports(options.host, dict(zip(_PORT_SETTINGS, wanted, strict=True)))
        self.log_path = log_path
        self._sink: IO[bytes] = log_path.open("wb") if log_path else sys.stderr.buffer
        self._shm_prefix = new_region_prefix()
        self._run_dir = Path(tempfile.mkdtemp(prefix="deepseek-triton-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._log: LogCopier | None = None
        self._stub_watch: StubWatch | None = None

    @property
    def http_url(self) -> str:
        """HOST:PORT of the HTTP service, as tritonclient takes it."""
        return f"{self._reachable_host}:{self._ports['--http-port']}"

    @property
    def grpc_url(self) -> str:
        """HOST:PORT of the gRPC service, as tritonclient takes it."""
        return f"{self._reachable_host}:{self._ports['--grpc-port']}"

    @property
    def metrics_url(self) -> str:
        """URL of the Prometheus metrics."""
        return f"http://{self._reachable_host}:{self._ports['--metrics-port']}/metrics"

    @property
    def pid(self) -> int:
        """Process id of tritonserver, which is its process group too."""
        return self._started.pid

    @property
    def shm_prefix(self) -> str:
        """Beginning of the names of this server's files in /dev/shm."""
        return self._shm_prefix

    def start(self, installation: ServerInstallation) -> None:
        """Start the process and the watchdog that cleans up if this process is killed."""
        backends = installation.link_backends(self._run_dir)
        env = installation.environment({**os.environ, **self._options.env})
        engine_dir = self._options.engine_dir.resolve()
        other = env.get(ENGINE_DIR_VARIABLE, "").strip()
        if other and Path(other).resolve() != engine_dir:
            logger.info("%s=%s is not used: %s was given", ENGINE_DIR_VARIABLE, other, engine_dir)
        env[ENGINE_DIR_VARIABLE] = str(engine_dir)
        self._process = subprocess.Popen(
            [str(installation.executable), *self._arguments(backends)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,  # a Ctrl-C reaches the launcher alone, which stops the server
        )
        self._watchdog = start_watchdog(self._process.pid, self._shm_prefix, self._run_dir)
        source = self._process.stdout
        if source is not None:
            self._log = LogCopier(source, self._sink)
            self._log.start()

    def wait_ready(self) -> None:
        """Return when every model is ready; from then on a model that dies ends the server.

        Raises:
            ServerError: the server ended, or is not ready in time; gives the reason from its log.
        """
        began = told = time.monotonic()
        deadline = began + self._options.ready_timeout_s
        while not self._answers("/v2/health/ready"):
            if self._started.poll() is not None:
                raise ServerError(f"tritonserver did not start:\n{self._reason()}")
            now = time.monotonic()
            if now > deadline:
                missing = [m for m in self._options.model_names() if not self._model_ready(m)]
                raise ServerError(
                    f"not ready after {self._options.ready_timeout_s:g} s, still waiting for "
                    f"{', '.join(missing) or 'the server'}; raise --ready-timeout if the engine "
                    f"is large:\n{self._reason()}"
                )
            if now - told >= _TELL_S:  # a large engine is read twice: to verify it and to load it
                logger.info("the models are loading, %.0f s so far", now - began)
                told = now
            time.sleep(_POLL_S)
        options = self._options
        self._stub_watch = StubWatch(self.pid, options.model_repository, options.model_names())
        self._stub_watch.start()

    def wait(self) -> None:
        """Block until the server ends of itself.

        Raises:
            ServerError: always, since a server that nobody stopped has failed.
        """
        code = self._started.wait()
        if self._stub_watch is not None and self._stub_watch.problem is not None:
            raise ServerError(self._stub_watch.problem)
        raise ServerError(f"tritonserver ended with status {code}:\n{self._reason()}")

    def stop(self) -> None:
        """Stop the server, its stubs and the watchdog, and remove their files; idempotent.

        Requests in flight have exit_timeout_s to finish. KeyboardInterrupt in the meantime kills.
        """
        try:
            if self._stub_watch is not None:
                self._stub_watch.stop()
            if self._process is not None:
                end_group(self._process.pid, self._options.exit_timeout_s + 2.0)
        except KeyboardInterrupt:
            logger.warning("killing the server")
        finally:
            self._clean_up()

    def kill(self) -> None:
        """Stop the server at once, whatever it does; `stop` has then little left to do."""
        if self._stub_watch is not None:
            self._stub_watch.stop()
        if self._process is not None:
            kill_group(self._process.pid)

    def _clean_up(self) -> None:
        if self._process is not None:
            kill_group(self._process.pid)
            self._process.wait()
        if self._log is not None:
            self._log.join(timeout=5.0)
        remove_regions(self._shm_prefix)
        shutil.rmtree(self._run_dir, ignore_errors=True)
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.communicate()
        if self.log_path is not None:
            self._sink.close()

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server was not started")
        return self._process

    @property
    def _reachable_host(self) -> str:
        wildcard = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
        host = self._options.host
        return wildcard.get(host, f"[{host}]" if ":" in host else host)

    def _arguments(self, backends: Path) -> list[str]:
        options = self._options
        python_backend = {
            "shm-region-prefix-name": self._shm_prefix,
            "stub-timeout-seconds": _STUB_TIMEOUT_S,
        }
        arguments = [
            f"--model-repository={options.model_repository.resolve()}",
            f"--backend-directory={backends}",
            *(f"--backend-config=python,{key}={value}" for key, value in python_backend.items()),
            *(f"--{service}-address={options.host}" for service in ("http", "grpc", "metrics")),
            *(f"{setting}={port}" for setting, port in self._ports.items()),
            f"--exit-timeout-secs={options.exit_timeout_s}",
        ]
        if not Path("/dev/nvidiactl").exists():
            arguments.append("--allow-gpu-metrics=false")
        if options.log_verbose:
            arguments.append(f"--log-verbose={options.log_verbose}")
        return arguments + list(options.extra_args)

    def _model_ready(self, model: str) -> bool:
        return self._answers(f"/v2/models/{model}/ready")

    def _answers(self, path: str) -> bool:
        """Return whether GET `path` gives 200."""
        connection = http.client.HTTPConnection(self.http_url, timeout=5.0)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _reason(self) -> str:
        if self._log is None:
            return "it has no log"
        if self._started.poll() is not None:
            kill_group(self._started.pid)  # a stub left over would keep the log open
            self._log.join(timeout=5.0)
        return failure_reason(self._log.lines())


@contextlib.contextmanager
def running_server(
    options: ServerOptions,
    *,
    log_path: Path | None = None,
    installation: ServerInstallation | None = None,
) -> Iterator[RunningServer]:
    """Serve `options.engine_dir` for the time of the block, which begins when it is ready.

    The server's log goes to `log_path`, or to standard error. `installation` is found when not
    given. No process and no file of the server outlives the block, nor this process.

    Raises:
        ServerError: no tritonserver, a port in use, too little shared memory, or a model that
            does not load.
    """
    if not options.model_names():
        raise ServerError(
            f"{options.model_repository}: no model (a folder with a config.pbtxt) there; give the "
            "model_repository/ folder of the project with --model-repository"
        )
    check_space()
    installation = installation or find_server()
    server = RunningServer(options, log_path)
    try:
        server.start(installation)
        server.wait_ready()
        yield server
    finally:
        server.stop()
