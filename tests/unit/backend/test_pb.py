from __future__ import annotations

import json

import pytest

from deepseek_triton.backend.pb import describe, model_parameters, request_parameter_int
from deepseek_triton.errors import EngineDeadError, InvalidRequestError
from tests.unit.backend.fakes import FakeRequest


def test_parameters_of_the_model_are_flat_strings() -> None:
    config = {"parameters": {"engine_dir": {"string_value": "/e"}, "num_threads": {}}}
    args = {"model_config": json.dumps(config)}
    assert model_parameters(args) == {"engine_dir": "/e", "num_threads": ""}
    assert model_parameters({"model_config": "{}"}) == {}


@pytest.mark.parametrize(("sent", "value"), [({}, None), ({"a": None}, None), ({"a": 3}, 3),
                                             ({"a": "-4"}, -4), ({"ba": 1}, None)])  # fmt: skip
def test_an_integer_parameter_is_a_number_or_spells_one(sent: dict, value: int | None) -> None:
    assert request_parameter_int(FakeRequest({}, parameters=sent), "a") == value


@pytest.mark.parametrize("sent", ["x", "", True, 1.5, [1]])
def test_any_other_parameter_is_refused_by_name(sent: object) -> None:
    with pytest.raises(InvalidRequestError, match="^a: "):
        request_parameter_int(FakeRequest({}, parameters={"a": sent}), "a")


def test_an_unexpected_error_says_so() -> None:
    assert describe(EngineDeadError("dead")) == ("dead", "UNAVAILABLE")
    assert describe(KeyError("x")) == ("internal error (KeyError): 'x'", "INTERNAL")
