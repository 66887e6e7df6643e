"""A model with grouped-query attention, through the whole server, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.server import RunningServer, running_server
from deepseek_triton.text.tokenizer import Tokenizer
from tests.e2e.conftest import options
from tests.e2e.reference import Reference
from tests.e2e.support import NEVER, PROMPTS, complete, concurrently, is_idle, wait_until

TOKENS = 16


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families") / "checkpoint"
    return write_random_checkpoint(folder, preset_config("llama"))


@pytest.fixture(scope="module")
def server(llama: Path) -> Iterator[RunningServer]:
    engine = llama.with_name("engine")
    build_engine(llama, engine)
    with running_server(options(engine), log_path=engine.with_name("server.log")) as running:
        yield running


def test_greedy_text_is_that_of_transformers_alone_and_in_company(
    server: RunningServer, llama: Path
) -> None:
    pytest.importorskip("torch", reason="the reference needs torch and transformers")
    reference, tokenizer = Reference.load(llama), Tokenizer.load(llama)
    prompts = (PROMPTS[0], PROMPTS[3], PROMPTS[7])
    ask = partial(complete, server, max_tokens=TOKENS, end_id=NEVER)
    expected = [
        tokenizer.decode(reference.greedy(tokenizer.encode(prompt), TOKENS)[0])
        for prompt in prompts
    ]
    assert [ask(prompt).text for prompt in prompts] == expected
    answers = concurrently([partial(ask, prompt) for prompt in prompts])
    assert [answer.text for answer in answers] == expected
    wait_until(lambda: is_idle(server), 5.0, "the engine is idle after the test")


def test_a_seed_gives_the_same_text_at_any_load(server: RunningServer) -> None:
    ask = partial(complete, server, max_tokens=TOKENS, end_id=NEVER, temperature=1.0)
    alone = [ask(PROMPTS[0], seed=seed).text for seed in (1, 2, 3)]
    assert len(set(alone)) == 3
    answers = concurrently([partial(ask, PROMPTS[0], seed=seed) for seed in (1, 2, 3)])
    assert [answer.text for answer in answers] == alone
    wait_until(lambda: is_idle(server), 5.0, "the engine is idle after the test")
