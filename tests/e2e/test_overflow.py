"""A prompt whose activations overflow gets an error with a way out; neighbours notice nothing.

Wherever in the prompt: in its last token, or in one that later tokens attend to.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.checkpoint.presets import preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.server import RunningServer, running_server
from deepseek_triton.text.tokenizer import Tokenizer
from tests.e2e.conftest import options
from tests.e2e.support import NEVER, Answer, complete, concurrently, is_idle, wait_until

LOUD = "class"  # the word whose embedding is changed
QUIET = "Once upon a time"
PROMPTS = (LOUD, f"{LOUD} {QUIET}", f"{QUIET}\n{LOUD} {'and then ' * 300}")  # several chunks


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A bf16 engine whose hidden states for LOUD have squares beyond float32."""
    folder: Path = tmp_path_factory.mktemp("overflow")
    checkpoint = write_random_checkpoint(folder / "checkpoint", preset_config("v2-lite"))
    tokenizer = Tokenizer.load(checkpoint)
    loud = tokenizer.encode(LOUD)[-1]
    assert all(loud in tokenizer.encode(prompt) for prompt in PROMPTS)
    assert loud not in tokenizer.encode(QUIET)
    (file,) = checkpoint.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][loud] = np.float32(1e25)
    save_file(tensors, file)
    build_engine(checkpoint, folder / "engine", precision="bf16")
    log = folder / "server.log"
    with running_server(options(folder / "engine"), log_path=log) as running:
        yield running


@pytest.mark.parametrize("prompt", PROMPTS, ids=["alone", "first", "earlier chunk"])
def test_an_overflow_is_an_error_with_advice_and_neighbours_are_clean(
    server: RunningServer, prompt: str
) -> None:
    ask = partial(complete, server, max_tokens=24, end_id=NEVER)
    alone = ask(QUIET).text
    assert alone

    def overflow() -> Answer:
        problem = "no finite logits" if prompt == LOUD else "hidden states are not finite"
        with pytest.raises(Exception, match=f"{problem}.*PRECISION=fp32") as caught:
            ask(prompt)
        return Answer(str(caught.value), "error", ())

    answers = concurrently([partial(ask, QUIET), overflow, partial(ask, QUIET), overflow])
    assert [answers[0].text, answers[2].text] == [alone, alone]
    wait_until(lambda: is_idle(server), 5.0, "the engine is idle after the test")
