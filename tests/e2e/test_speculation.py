"""Drafts through the real server: the same text, in fewer steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.server import running_server
from tests.e2e.conftest import options
from tests.e2e.support import complete, concurrently, settled

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
HEADS = tuple(f"def {name}(path):\n" for name in ("read_lines", "copy", "is_empty", "touch"))
SAMPLINGS = ({}, {"temperature": 0.9, "seed": 5}, {"stop_words": ["\n\n"]}, {"min_tokens": 40})


def answers(folder: Path, *, draft: bool) -> tuple[list[tuple[str, str]], dict[str, float]]:
    """Texts and finish reasons of all requests at once, and the server's metrics after them."""
    build_engine(DEMO, folder / "engine", draft=draft)
    with running_server(options(folder / "engine"), log_path=folder / "server.log") as server:
        calls = [
            partial(complete, server, head, stream=True, max_tokens=48, **sampling)
            for head in HEADS
            for sampling in SAMPLINGS
        ]
        whole = [(answer.text, answer.finish_reason) for answer in concurrently(calls)]
        return whole, settled(server)


def test_texts_are_the_same_with_and_without_drafts(tmp_path: Path) -> None:
    expected, plain = answers(tmp_path / "plain", draft=False)
    texts, counted = answers(tmp_path / "drafting", draft=True)
    assert texts == expected
    assert plain["draft_tokens_total"] == 0
    drafts, right = counted["draft_tokens_total"], counted["draft_tokens_accepted_total"]
    assert 0.4 * drafts < right < drafts
    assert {reason for _, reason in texts} == {"length", "stop"}
