from __future__ import annotations

import pytest

from deepseek_triton.wire import ENSEMBLE, MODELS

SIDES = [(model, side) for model in MODELS for side in ("inputs", "outputs")]


@pytest.mark.parametrize(("model", "side"), SIDES)
def test_names_are_unique(model: str, side: str) -> None:
    names = [tensor.name for tensor in getattr(MODELS[model], side)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("model", MODELS)
def test_neutral_values_fit_the_dtype(model: str) -> None:
    kinds = {"STRING": str, "BOOL": bool, "INT32": int, "INT64": int, "UINT64": int, "FP32": float}
    for tensor in MODELS[model].inputs:
        for value in tensor.neutral:
            assert type(value) is kinds[tensor.dtype], tensor


def test_each_ensemble_input_means_the_same_where_it_is_read() -> None:
    outer = {tensor.name: tensor for tensor in MODELS[ENSEMBLE].inputs}
    for model in ("preprocessing", "tensorrt_llm"):
        for tensor in MODELS[model].inputs:
            other = outer.get(tensor.ensemble_name)
            if other is None or tensor.ensemble_name in ("text_input", "stop_words"):
                continue
            assert (tensor.implemented, tensor.neutral) == (other.implemented, other.neutral)
