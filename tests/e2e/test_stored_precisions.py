"""Engines whose weights are not float32, through the whole server: INT4, fp16, bf16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.calibrate.quantize import QuantizeOptions, quantize_checkpoint
from deepseek_triton.evaluate.perplexity import continue_greedily
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
from deepseek_triton.server import RunningServer, running_server
from deepseek_triton.text.tokenizer import Tokenizer
from tests.e2e.conftest import options
from tests.e2e.support import NEVER, complete, concurrently, is_idle, wait_until

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
HEADS = ("def read_lines(path):\n", "class Point:\n    ", "深度学习", "import os\n" * 9)
TOKENS = 24
LARGEST = {"int4": 18e6, "fp16": 26e6, "bf16": 26e6}  # bytes of an engine; in float32 50e6


@dataclass(frozen=True)
class Served:
    """A server, and the text that its engine's runner continues HEADS with by itself."""

    server: RunningServer
    expected: list[str]


@pytest.fixture(scope="module", params=list(LARGEST))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    engine = folder / "engine"
    if request.param == "int4":
        quantize_checkpoint(DEMO, folder / "checkpoint", QuantizeOptions("rtn", 128), [])
        build_engine(folder / "checkpoint", engine)
    else:
        build_engine(DEMO, engine, precision=request.param)
    assert sum(file.stat().st_size for file in engine.iterdir()) < LARGEST[request.param]
    tokenizer = Tokenizer.load(engine)
    with closing(OnnxRuntimeRunner.load(engine, num_blocks=64)) as runner:
        prompts = [np.array([tokenizer.encode(head)], np.int32) for head in HEADS]
        tokens = [continue_greedily(runner, prompt, TOKENS)[0].tolist() for prompt in prompts]
    with running_server(options(engine), log_path=folder / "server.log") as running:
        yield Served(running, [tokenizer.decode(ids) for ids in tokens])


def test_the_streamed_text_is_what_the_runner_finds_greedily(served: Served) -> None:
    ask = partial(complete, served.server, max_tokens=TOKENS, end_id=NEVER, stream=True)
    alone = [ask(head) for head in HEADS]
    assert [answer.text for answer in alone] == served.expected
    assert all(len(answer.deltas) > TOKENS // 2 for answer in alone), "streamed token by token"
    in_company = concurrently([partial(ask, head) for head in HEADS])
    assert [answer.text for answer in in_company] == served.expected
    wait_until(lambda: is_idle(served.server), 5.0, "the engine is idle after the test")
