"""Reading the tensors of one request: one prompt, each value named as the client spells it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.backend.pb import Arrays
from deepseek_triton.errors import InvalidRequestError, UnsupportedTensorError
from deepseek_triton.wire import MODELS, Tensor


class Inputs:
    """The tensors that came with one request to `model`.

    Errors name a tensor as the client of the ensemble spells it when `for_ensemble`, else by the
    model's own name.
    """

    def __init__(self, model: str, arrays: Arrays, *, for_ensemble: bool) -> None:
        self._tensors = _INPUTS[model]
        self._arrays = arrays
        self._for_ensemble = for_ensemble

    def field(self, name: str) -> str:
        """Return how the client spells the model's input `name`."""
        return self._tensors[name].ensemble_name if self._for_ensemble else name

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def check_supported(self) -> None:
        """Raise UnsupportedTensorError for a tensor that is not implemented and says something."""
        for name, array in self._arrays.items():
            tensor = self._tensors[name]
            if not tensor.implemented and not _is_neutral(tensor, array):
                neutral = " or ".join(repr(value) for value in tensor.neutral)
                raise UnsupportedTensorError(
                    self.field(name),
                    "not supported; leave it out" + (f" or send {neutral}" if neutral else ""),
                )

    def check_one_prompt(self, name: str) -> None:
        """Raise InvalidRequestError if the batch dimension of input `name` is not 1."""
        batch = len(self._arrays[name])
        if batch != 1:
            raise InvalidRequestError(
                self.field(name), f"{batch} prompts in one request; send one prompt per request"
            )

    def array(self, name: str) -> NDArray[Any] | None:
        """Return the elements of an input in one dimension, None if it was not sent."""
        array = self._arrays.get(name)
        return None if array is None else array.reshape(-1)

    def integer(self, name: str) -> int | None:
        """Return the value of a one-element integer input, None if it was not sent."""
        array = self._one(name)
        return None if array is None else int(array[0])

    def number(self, name: str) -> float | None:
        """Return the value of a one-element float input; raises for NaN and Inf."""
        array = self._one(name)
        if array is None:
            return None
        value = float(array[0])
        if not math.isfinite(value):
            raise InvalidRequestError(self.field(name), f"{value} is not a finite number")
        return value

    def flag(self, name: str) -> bool | None:
        """Return the value of a one-element BOOL input, None if it was not sent."""
        array = self._one(name)
        return None if array is None else bool(array[0])

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the strings of a STRING input; raises InvalidRequestError unless UTF-8."""
        array = self.array(name)
        return () if array is None else tuple(self._text(name, value) for value in array)

    def either(self, name: str, older: str) -> int | None:
        """Return an integer input that goes by two names; raises if they contradict."""
        value, other = self.integer(name), self.integer(older)
        if value is not None and other is not None and value != other:
            raise InvalidRequestError(
                self.field(name),
                f"{value} contradicts {self.field(older)}, which is {other}; send one of them",
            )
        return other if value is None else value

    def _one(self, name: str) -> NDArray[Any] | None:
        array = self.array(name)
        if array is not None and array.size != 1:
            raise InvalidRequestError(
                self.field(name), f"{array.size} values; exactly one is expected"
            )
        return array

    def _text(self, name: str, value: bytes | str) -> str:
        if isinstance(value, str):
            return value
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequestError(
                self.field(name), f"not valid UTF-8 at byte {error.start}"
            ) from error


_INPUTS: dict[str, dict[str, Tensor]] = {
    model: {tensor.name: tensor for tensor in wire.inputs} for model, wire in MODELS.items()
}


def _is_neutral(tensor: Tensor, array: NDArray[Any]) -> bool:
    """Whether the content of a tensor means what its absence means."""
    if array.size == 0:
        return True
    if array.dtype == np.object_:
        neutral = {value.encode() for value in tensor.neutral if isinstance(value, str)}
        return all((v.encode() if isinstance(v, str) else v) in neutral for v in array.reshape(-1))
    return bool(tensor.neutral) and bool(np.isin(array, tensor.neutral).all())
