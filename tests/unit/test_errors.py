from __future__ import annotations

import pickle

import pytest

from deepseek_triton import errors


def test_the_most_specific_status_wins() -> None:
    assert errors.triton_status(errors.UnsupportedTensorError("beam_width", "x")) == "INVALID_ARG"
    assert errors.triton_status(errors.OverloadedError("full")) == "UNAVAILABLE"
    assert errors.triton_status(errors.CheckpointError("x")) == "INTERNAL"
    assert errors.triton_status(ValueError("x")) == "INTERNAL"


def test_an_invalid_request_names_its_field() -> None:
    error = errors.InvalidRequestError("top_p", "1.5 is over 1")
    assert error.field == "top_p"
    assert str(error) == "top_p: 1.5 is over 1"


def test_every_error_is_in_the_tree_and_in_its_drawing() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    for cls in classes:
        assert issubclass(cls, errors.DeepseekTritonError)
        assert cls.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize(
    "error",
    [
        errors.UnsupportedTensorError("bad_words", "not supported"),
        errors.RequestFailedError("key", "no finite logits"),
        errors.EngineDeadError("restart the server"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_a_pickle(error: errors.DeepseekTritonError) -> None:
    found = pickle.loads(pickle.dumps(error, 5))
    assert type(found) is type(error)
    assert (str(found), vars(found)) == (str(error), vars(error))
