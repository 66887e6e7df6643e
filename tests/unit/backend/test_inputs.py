from __future__ import annotations

import numpy as np
import pytest

from deepseek_triton.backend.inputs import Inputs
from deepseek_triton.errors import InvalidRequestError, UnsupportedTensorError
from deepseek_triton.wire import ENGINE, MODELS, PREPROCESSING, Tensor
from tests.unit.backend.fakes import column

NUMPY = {
    "BOOL": np.bool_, "UINT8": np.uint8, "INT32": np.int32, "INT64": np.int64,
    "UINT64": np.uint64, "FP16": np.float16, "FP32": np.float32, "STRING": np.object_,
}  # fmt: skip
UNSUPPORTED = [
    pytest.param(model, tensor, id=f"{model}.{tensor.name}")
    for model in (PREPROCESSING, ENGINE)
    for tensor in MODELS[model].inputs
    if not tensor.implemented
]
# A value that no unsupported tensor takes for its absence.
TELLING = {"STRING": b"x", "BOOL": True}


def filled(tensor: Tensor, value: object) -> np.ndarray:
    shape = [1, *(2 if dim == -1 else dim for dim in tensor.dims)]
    return np.full(shape, value, NUMPY[tensor.dtype])


def check(model: str, tensor: Tensor, array: np.ndarray, *, for_ensemble: bool = False) -> None:
    Inputs(model, {tensor.name: array}, for_ensemble=for_ensemble).check_supported()


@pytest.mark.parametrize(("model", "tensor"), UNSUPPORTED)
def test_what_is_not_implemented_is_refused_by_name(model: str, tensor: Tensor) -> None:
    array = filled(tensor, TELLING.get(tensor.dtype, 3))
    with pytest.raises(UnsupportedTensorError, match=f"^{tensor.name}: not supported"):
        check(model, tensor, array)
    with pytest.raises(UnsupportedTensorError, match=f"^{tensor.ensemble_name}: not supported"):
        check(model, tensor, array, for_ensemble=True)


@pytest.mark.parametrize(("model", "tensor"), UNSUPPORTED)
def test_an_empty_tensor_passes(model: str, tensor: Tensor) -> None:
    array = filled(tensor, TELLING.get(tensor.dtype, 3)).reshape(-1)[:0].reshape(1, 0)
    check(model, tensor, array)


@pytest.mark.parametrize(("model", "tensor"), UNSUPPORTED)
def test_a_neutral_value_passes(model: str, tensor: Tensor) -> None:
    for value in tensor.neutral:
        check(model, tensor, filled(tensor, value.encode() if isinstance(value, str) else value))


def test_one_telling_value_among_neutral_ones_is_refused() -> None:
    inputs = Inputs(PREPROCESSING, {"BAD_WORDS_DICT": column(object, "", "x")}, for_ensemble=True)
    with pytest.raises(UnsupportedTensorError, match="bad_words"):
        inputs.check_supported()


def test_values_are_read_and_absent_ones_are_none() -> None:
    inputs = Inputs(
        ENGINE,
        {
            "end_id": np.array([7], np.int32),  # reshaped to no dimension but the batch
            "temperature": column(np.float32, 0.5),
            "streaming": column(np.bool_, True),
            "stop_words": column(object, "a", "é"),
        },
        for_ensemble=False,
    )
    assert inputs.integer("end_id") == 7
    assert inputs.number("temperature") == 0.5
    assert inputs.flag("streaming") is True
    assert inputs.texts("stop_words") == ("a", "é")
    assert inputs.integer("seed") is inputs.number("runtime_top_p") is inputs.flag("stop") is None
    assert inputs.texts("request_key") == ()
    assert "end_id" in inputs and "seed" not in inputs


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_must_be_finite(value: float) -> None:
    inputs = Inputs(ENGINE, {"runtime_top_p": column(np.float32, value)}, for_ensemble=True)
    with pytest.raises(InvalidRequestError, match="^top_p: .*not a finite number"):
        inputs.number("runtime_top_p")


def test_a_scalar_must_be_one_value() -> None:
    inputs = Inputs(ENGINE, {"end_id": column(np.int32, 1, 2)}, for_ensemble=False)
    with pytest.raises(InvalidRequestError, match="^end_id: 2 values"):
        inputs.integer("end_id")


def test_text_must_be_utf8() -> None:
    inputs = Inputs(ENGINE, {"stop_words": column(object, b"ab\xff")}, for_ensemble=True)
    with pytest.raises(InvalidRequestError, match="^stop_words: not valid UTF-8 at byte 2"):
        inputs.texts("stop_words")


def test_a_batch_of_prompts_is_refused() -> None:
    inputs = Inputs(ENGINE, {"input_lengths": np.ones(2, np.int32)}, for_ensemble=True)
    with pytest.raises(InvalidRequestError, match="^text_input: 2 prompts.*one prompt per request"):
        inputs.check_one_prompt("input_lengths")


def test_both_spellings_are_read_unless_they_contradict() -> None:
    def seed(**values: int) -> int | None:
        arrays = {name: column(np.uint64, value) for name, value in values.items()}
        return Inputs(ENGINE, arrays, for_ensemble=True).either("seed", "random_seed")

    assert seed() is None
    assert seed(seed=0) == seed(random_seed=0) == seed(seed=0, random_seed=0) == 0
    assert seed(random_seed=2**64 - 1) == 2**64 - 1
    with pytest.raises(InvalidRequestError, match="^seed: 1 contradicts random_seed, which is 2"):
        seed(seed=1, random_seed=2)
