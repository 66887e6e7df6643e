"""schemathesis against the gateway's own OpenAPI description, with a real server behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from deepseek_triton.server import RunningServer
from tests.e2e.test_gateway import MODEL, running_gateway

MAX_EXAMPLES = 10  # of each operation, valid and spoilt
GENERATING = ("/v1/chat/completions", "/v1/completions")


@pytest.fixture(scope="module")
def address(engine: Path, shared_server: RunningServer) -> Iterator[str]:
    log_path = engine.with_name("gateway-schema.log")
    with running_gateway(engine, shared_server.grpc_url, log_path) as url:
        yield url


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
def test_answers_are_as_described(address: str, mode: GenerationMode) -> None:
    tested = 0
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    for operation in (result.ok() for result in schema.get_all_operations()):
        spoilable = operation.body and operation.label != "POST /v1/embeddings"
        if mode is GenerationMode.POSITIVE or spoilable:
            check(operation, mode)
            tested += 1
    assert tested >= (4 if mode is GenerationMode.NEGATIVE else 10)


def check(operation: Any, mode: GenerationMode) -> None:
    """Send requests made from the description, and compare the answers with it.

    Some valid ones are refused: no schema can say what a chat template takes.
    """

    @settings(
        max_examples=MAX_EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if operation.path in GENERATING and isinstance(case.body, dict):
            case.body.update(max_tokens=2, n=1)  # short answers: what is tested is their form
            case.body.pop("max_completion_tokens", None)
            if mode is GenerationMode.POSITIVE:
                case.body["model"] = MODEL
        case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=30.0)

    send()


def test_the_description_names_every_route_and_only_answers_that_are_given(address: str) -> None:
    description = httpx.get(f"{address}/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize"} <= set(
        description["paths"]
    )
    for operations in description["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]
