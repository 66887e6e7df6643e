from __future__ import annotations

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
