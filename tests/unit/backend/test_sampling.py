from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepseek_triton.backend.inputs import Inputs
from deepseek_triton.backend.sampling import sampling_params
from deepseek_triton.errors import InvalidRequestError
from deepseek_triton.request import SamplingParams
from deepseek_triton.wire import ENGINE
from tests.unit.backend.fakes import column

DTYPES = {"runtime_top_k": np.int32, "min_tokens": np.int32, "min_length": np.int32,
          "seed": np.uint64, "return_log_probs": np.bool_}  # fmt: skip


def read(**values: Any) -> SamplingParams:
    arrays = {name: column(DTYPES.get(name, np.float32), v) for name, v in values.items()}
    inputs = Inputs(ENGINE, arrays, for_ensemble=True)
    return sampling_params(inputs, vocab_size=100, max_tokens=10)


def test_a_request_that_says_nothing_is_greedy() -> None:
    assert read() == SamplingParams()
    assert read().greedy


def test_top_k_or_top_p_alone_sample_at_temperature_one() -> None:
    assert read(runtime_top_k=5) == SamplingParams(temperature=1.0, top_k=5)
    assert read(runtime_top_p=0.5) == SamplingParams(temperature=1.0, top_p=0.5)
    assert read(runtime_top_k=1).greedy and read(runtime_top_p=0.0).greedy


def test_temperature_alone_samples() -> None:
    assert read(temperature=0.5) == SamplingParams(temperature=0.5)


@pytest.mark.parametrize("value", [0.0, 1e-12, 9e-6])
def test_a_temperature_near_zero_is_greedy(value: float) -> None:
    assert read(temperature=value).temperature == 0.0


@pytest.mark.parametrize("value", [0, -1, 100, 9999999])
def test_a_top_k_that_keeps_every_token_is_none(value: int) -> None:
    assert read(temperature=1.0, runtime_top_k=value).top_k == 0


def test_the_rest_is_passed_on() -> None:
    params = read(
        repetition_penalty=1.5, presence_penalty=-2.0, frequency_penalty=2.0,
        min_tokens=10, seed=2**64 - 1, return_log_probs=True,
    )  # fmt: skip
    assert params == SamplingParams(
        repetition_penalty=1.5, presence_penalty=-2.0, frequency_penalty=2.0,
        min_tokens=10, seed=2**64 - 1, return_log_probs=True,
    )  # fmt: skip
    assert read(min_length=3).min_tokens == 3


@pytest.mark.parametrize("value", [0.01, 100.0])
def test_the_ends_of_the_range_of_the_repetition_penalty_are_allowed(value: float) -> None:
    assert read(repetition_penalty=value).repetition_penalty == np.float32(value)


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("temperature", -1.0, "temperature"),
        ("temperature", np.nan, "temperature"),
        ("temperature", np.inf, "temperature"),
        ("runtime_top_k", -2, "top_k"),
        ("runtime_top_p", -0.1, "top_p"),
        ("runtime_top_p", 1.5, "top_p"),
        ("runtime_top_p", np.nan, "top_p"),
        ("repetition_penalty", 0.0, "repetition_penalty"),
        ("repetition_penalty", -1.0, "repetition_penalty"),
        ("repetition_penalty", 1e-38, "repetition_penalty"),
        ("repetition_penalty", 0.0099, "repetition_penalty"),
        ("repetition_penalty", 100.1, "repetition_penalty"),
        ("repetition_penalty", np.inf, "repetition_penalty"),
        ("presence_penalty", 2.5, "presence_penalty"),
        ("presence_penalty", np.nan, "presence_penalty"),
        ("frequency_penalty", -2.5, "frequency_penalty"),
        ("min_tokens", -1, "min_tokens"),
        ("min_tokens", 11, "min_tokens"),
        ("min_length", 11, "min_length"),
    ],
)
def test_a_value_without_a_meaning_is_refused_by_name(name: str, value: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(**{name: value})
    assert caught.value.field == field
