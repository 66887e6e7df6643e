"""A checkpoint, its engine, and running servers that the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.server import RunningServer, ServerOptions, running_server
from deepseek_triton.text.tokenizer import Tokenizer
from tests.e2e.support import is_idle, wait_until

HERE = Path(__file__).parent
SMALL_POOL_BLOCKS = 24
SHORT_DEADLINE_MS = 1500
LOG_LINES_SHOWN = 20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show the end of the server's log with a failure."""
    report = yield
    fixtures = getattr(item, "funcargs", {}).values()
    logs = {f.log_path for f in fixtures if isinstance(f, RunningServer)} - {None}
    for log in logs if report.failed else ():
        text = log.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if not line.startswith(("|", "+"))]
        report.sections.append((log.name, "\n".join(lines[-LOG_LINES_SHOWN:])))
    return report


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("e2e") / "checkpoint"
    return write_random_checkpoint(folder, preset_config("v2-lite"), seed=0)


@pytest.fixture(scope="session")
def engine(checkpoint: Path) -> Path:
    folder = checkpoint.with_name("engine")
    build_engine(checkpoint, folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(engine: Path) -> Tokenizer:
    return Tokenizer.load(engine)


def options(engine: Path, **settings: object) -> ServerOptions:
    """Options for free ports, with engine settings by name."""
    env = {f"DEEPSEEK_TRITON_{key.upper()}": str(value) for key, value in settings.items()}
    return ServerOptions(
        engine, http_port=0, grpc_port=0, metrics_port=0, ready_timeout_s=90, exit_timeout_s=3,
        env={"DEEPSEEK_TRITON_KV_CACHE_NUM_BLOCKS": "1024", **env},
    )  # fmt: skip


@pytest.fixture(scope="session")
def shared_server(engine: Path) -> Iterator[RunningServer]:
    with running_server(options(engine), log_path=engine.with_name("server.log")) as running:
        yield running


@pytest.fixture(scope="session")
def shared_small_server(engine: Path) -> Iterator[RunningServer]:
    settings = {
        "kv_cache_num_blocks": SMALL_POOL_BLOCKS,
        "default_deadline_ms": SHORT_DEADLINE_MS,
    }
    log = engine.with_name("small-server.log")
    with running_server(options(engine, **settings), log_path=log) as running:
        yield running


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server; a test that leaves work or KV blocks behind fails."""
    yield shared_server
    wait_until(lambda: is_idle(shared_server), 5.0, "the engine is idle after the test")


@pytest.fixture
def small_server(shared_small_server: RunningServer) -> Iterator[RunningServer]:
    """A server with a pool of SMALL_POOL_BLOCKS blocks and a default deadline that is short."""
    yield shared_small_server
    wait_until(lambda: is_idle(shared_small_server), 5.0, "the engine is idle after the test")
