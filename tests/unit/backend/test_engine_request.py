from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepseek_triton.backend.engine_request import ReplyOptions, read_request
from deepseek_triton.backend.inputs import Inputs
from deepseek_triton.backend.opening import EngineLimits
from deepseek_triton.errors import InvalidRequestError, UnsupportedTensorError
from deepseek_triton.request import Request, RequestKey
from deepseek_triton.wire import ENGINE
from tests.unit.backend.fakes import column

LIMITS = EngineLimits(vocab_size=50, max_context_len=20, end_ids=(1, 2))


def read(
    ids: tuple[int, ...] = (5, 6, 7),
    max_tokens: int = 4,
    *,
    for_ensemble: bool = False,
    **more: Any,
) -> tuple[Request, ReplyOptions]:
    arrays = {
        "input_ids": column(np.int32, *ids),
        "input_lengths": np.array([len(ids)], np.int32),
        "request_output_len": np.array([max_tokens], np.int32),
        **more,
    }
    arrays = {name: array for name, array in arrays.items() if array is not None}
    inputs = Inputs(ENGINE, arrays, for_ensemble=for_ensemble)
    return read_request(inputs, LIMITS, RequestKey("k"), 123)


def test_a_plain_request() -> None:
    request, options = read()
    assert request == Request(
        RequestKey("k"), (5, 6, 7), 4, end_id=1, more_end_ids=(2,), deadline_ns=123
    )
    assert not options.stream


def test_an_end_id_replaces_the_models_own_and_minus_one_means_none() -> None:
    request, _ = read(end_id=column(np.int32, 9))
    assert (request.end_id, request.more_end_ids) == (9, ())
    request, _ = read(end_id=column(np.int32, -1))
    assert (request.end_id, request.more_end_ids) == (None, ())


@pytest.mark.parametrize(
    ("stream", "exclude", "echo"),
    [
        (None, None, True),
        (False, None, True),
        (True, None, False),
        (True, False, True),
        (False, True, False),
    ],
)
def test_the_prompt_is_echoed_by_default_unless_streamed(
    stream: bool | None, exclude: bool | None, echo: bool
) -> None:
    def flag(value: bool | None) -> np.ndarray | None:
        return None if value is None else column(np.bool_, value)

    _, options = read(streaming=flag(stream), exclude_input_in_output=flag(exclude))
    assert options.echo is echo


def test_prompt_and_output_may_fill_the_context_but_not_more() -> None:
    assert read(max_tokens=17)[0].max_tokens == 17
    with pytest.raises(InvalidRequestError) as caught:
        read(max_tokens=18, for_ensemble=True)
    assert caught.value.field == "max_tokens"
    for part in ("3 tokens", "max_tokens 18", "limit of 20"):
        assert part in str(caught.value)


@pytest.mark.parametrize("token_id", [-1, 50])
def test_a_token_outside_the_vocabulary_is_named(token_id: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read((5, token_id))
    assert caught.value.field == "input_ids"
    for part in (f"token id {token_id} at position 1", "50 tokens"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ids": ()}, "input_ids"),
        ({"input_ids": None}, "input_ids"),
        ({"input_lengths": np.array([2], np.int32)}, "input_lengths"),
        ({"max_tokens": 0}, "request_output_len"),
        ({"max_tokens": -1}, "request_output_len"),
        ({"end_id": column(np.int32, -2)}, "end_id"),
        ({"end_id": column(np.int32, 50)}, "end_id"),
        ({"beam_width": column(np.int32, 2)}, "beam_width"),
        ({"input_lengths": np.array([3, 3], np.int32)}, "input_lengths"),
    ],
)
def test_a_fault_is_named_as_sent(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(**change)
    assert caught.value.field == field


def test_stop_words_need_the_ensemble() -> None:
    words = column(object, "", "x")
    _, options = read(stop_words=words, request_key=column(object, "k"), for_ensemble=True)
    assert options.stop == ("x",)
    assert read(stop_words=column(object, ""))[1].stop == ()
    with pytest.raises(UnsupportedTensorError, match="^stop_words: .*call the ensemble"):
        read(stop_words=words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["x"] * 65, "65 stop strings; at most 64"),
        (["x" * 2048, "é" * 2049], "4097 characters; at most 4096"),
    ],
)
def test_stop_words_are_bounded(words: list[str], says: str) -> None:
    def stop(words: list[str]) -> tuple[str, ...]:
        sent = {"stop_words": column(object, *words), "request_key": column(object, "k")}
        return read(for_ensemble=True, **sent)[1].stop

    with pytest.raises(InvalidRequestError, match=f"^stop_words: {says}"):
        stop(words)
    assert stop([*words[:-1], "", ""]) == tuple(words[:-1]), "empty ones do not count"


def test_either_count_may_be_asked_for() -> None:
    assert not read()[1].return_counts
    for name in ("return_num_input_tokens", "return_num_output_tokens"):
        assert read(**{name: column(np.bool_, True)})[1].return_counts
