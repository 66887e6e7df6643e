"""The whole server against transformers on the same checkpoint: tokens, text, log probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.http_generate import generate
from deepseek_triton.server import RunningServer
from deepseek_triton.text.tokenizer import Tokenizer
from tests.e2e.reference import Reference
from tests.e2e.support import NEVER, PROMPTS, Answer, complete, engine_request, tensor

TOKENS = 24
TOLERANCE = 2e-4
LOG_PROBS = ("text_output", "finish_reason", "output_log_probs", "cum_log_probs")


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    pytest.importorskip("torch", reason="the reference needs torch and transformers")
    return Reference.load(checkpoint)


def output_ids(server: RunningServer, prompt: list[int], count: int, *extra: Any) -> list[int]:
    answer = engine_request(server, prompt, count, tensor("end_id", "INT32", [NEVER]), *extra)
    assert answer.errors == []
    return answer.arrays("output_ids")[-1].reshape(-1).tolist()[-count:]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_and_text_are_those_of_transformers(
    server: RunningServer, tokenizer: Tokenizer, reference: Reference, prompt: str
) -> None:
    prompt_ids = tokenizer.encode(prompt)
    expected, _ = reference.greedy(prompt_ids, TOKENS)
    assert output_ids(server, prompt_ids, TOKENS) == expected
    answer = complete(server, prompt, max_tokens=TOKENS, end_id=NEVER)
    assert answer.text == tokenizer.decode(expected)


def log_probs(answer: Answer) -> tuple[list[float], float]:
    """All log probs of an answer, one per token, and the last cumulative one."""
    pieces = [chunk.outputs["output_log_probs"].reshape(-1) for chunk in answer.chunks]
    return np.concatenate(pieces).tolist(), float(
        answer.chunks[-1].outputs["cum_log_probs"].flat[0]
    )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 4, "top_k": 50}], ids=str)
def test_log_probs_are_true_log_softmax(
    server: RunningServer,
    tokenizer: Tokenizer,
    reference: Reference,
    stream: bool,
    sampling: dict[str, Any],
) -> None:
    prompt = "What is deep learning?"
    prompt_ids = tokenizer.encode(prompt)
    answer = complete(
        server, prompt, max_tokens=8, end_id=NEVER, stream=stream, outputs=LOG_PROBS,
        return_log_probs=True, **sampling,
    )  # fmt: skip
    found, total = log_probs(answer)
    extra = [tensor("temperature", "FP32", [1.0]), tensor("seed", "UINT64", [4])]
    extra.append(tensor("runtime_top_k", "INT32", [50]))
    tokens = output_ids(server, prompt_ids, 8, *(extra if sampling else ()))
    expected = reference.log_probs(prompt_ids, tokens)
    assert len(found) == 8
    assert all(np.isfinite(found)) and max(found) <= 0.0
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    assert total == pytest.approx(sum(found), abs=1e-4)
    assert min(found) < -1e-3, "log probs of an uncertain model are not all zero"


def test_log_probs_over_http_agree_with_grpc(server: RunningServer) -> None:
    request = {"max_tokens": 8, "end_id": NEVER, "return_log_probs": True}
    found, total = log_probs(complete(server, "Hello", outputs=LOG_PROBS, stream=False, **request))
    answer = generate("Hello", url=server.http_url, **request)
    np.testing.assert_allclose(np.ravel(answer["output_log_probs"]), found, atol=1e-5)
    assert answer["cum_log_probs"] == pytest.approx(total, abs=1e-4)
