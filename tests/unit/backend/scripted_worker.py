"""The process of an engine whose runner is scripted: what the boot line of a test's engine calls.

The name of the engine directory says how it behaves.
"""

from __future__ import annotations

import os
import signal
import time
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from deepseek_triton.backend import engine_worker
from deepseek_triton.backend.opening import EngineLimits
from deepseek_triton.config import EngineConfig
from deepseek_triton.engine.loop import EngineLoop
from deepseek_triton.errors import EngineMismatchError
from deepseek_triton.text.guide import GuideCompiler
from deepseek_triton.text.tokenizer import Tokenizer
from tests.unit.engine.scripted_runner import ScriptedRunner

FOLDER = Path(str(resources.files("deepseek_triton.checkpoint") / "data"))
TOKENIZER = Tokenizer.load(FOLDER)
END = TOKENIZER.eos_token_id or 0


class ScriptedError(Exception):
    """An error that the server's process does not know."""


class Runner(ScriptedRunner):
    def __init__(self, name: str) -> None:
        super().__init__(2000, block_size=8, vocab_size=TOKENIZER.vocab_size)
        self.keep_steps = False
        self._name = name

    def run(self, rows: tuple[Any, ...]) -> Any:
        if self._name == "breaks":
            raise MemoryError("device lost")
        time.sleep(3600.0 if self._name == "hangs" else 0.001)
        return super().run(rows)

    def logits(self, request_key: Any, tokens: Any) -> Any:
        logits = super().logits(request_key, tokens)
        if request_key == "overflows":
            logits[:] = float("nan")
        return logits


def open_scripted(config: EngineConfig, **callbacks: Any) -> tuple[EngineLoop, EngineLimits]:
    name = config.engine_dir
    if name == "mismatch":
        raise EngineMismatchError("rebuild it")
    if name == "no memory":
        raise MemoryError("too large")
    if name == "unknown error":
        raise ScriptedError("the driver is too old")
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "loads for ever":
        print(os.getpid(), flush=True)  # noqa: T201, read by the test
        time.sleep(3600.0)
    runner = Runner(name)
    limits = EngineLimits(
        vocab_size=runner.vocab_size,
        max_context_len=10_000,
        end_ids=(END,),
        guides=None
        if name == "no guides"
        else GuideCompiler(FOLDER / "tokenizer.json", runner.vocab_size, [END]),
    )
    return EngineLoop(runner, config.scheduler, max_context_len=10_000, **callbacks), limits


def main(descriptor: int) -> NoReturn:
    engine_worker.main(descriptor, open_scripted)
