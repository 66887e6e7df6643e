from __future__ import annotations

import dataclasses
import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepseek_triton.backend.engine_request import read_request
from deepseek_triton.backend.extras import Extras, read_extras
from deepseek_triton.backend.inputs import Inputs
from deepseek_triton.backend.opening import EngineLimits
from deepseek_triton.backend.packet import TextOptions
from deepseek_triton.backend.postprocessing import token_tensors
from deepseek_triton.backend.text_stream import TextStream
from deepseek_triton.errors import InvalidRequestError, UnsupportedTensorError
from deepseek_triton.request import FinishReason, Request, RequestKey
from deepseek_triton.text.guide import GuideCompiler
from deepseek_triton.wire import ENGINE
from tests.unit.backend.fakes import TOKENIZER, FakeRequest, column

LIMITS = EngineLimits(vocab_size=50, max_context_len=20, end_ids=(1,))
FILE = Path(str(resources.files("deepseek_triton.checkpoint") / "data")) / "tokenizer.json"


def extras(**parameters: Any) -> Extras:
    return read_extras(FakeRequest({}, parameters=parameters), 50)


def read(max_tokens: int, wanted: Extras, limits: EngineLimits = LIMITS, **more: Any) -> Request:
    arrays = {
        "input_ids": column(np.int32, 5, 6, 7),
        "input_lengths": column(np.int32, 3),
        "request_output_len": column(np.int32, max_tokens),
        "request_key": column(np.object_, b"k"),
        **more,
    }
    inputs = Inputs(ENGINE, arrays, for_ensemble=True)
    return read_request(inputs, limits, RequestKey("k"), 1, wanted)[0]


def test_parameters_are_read() -> None:
    assert extras() == Extras()
    assert extras(deadline_ms=5) == Extras()
    found = extras(
        clip_max_tokens=True,
        return_token_ids=True,
        top_log_probs=5,
        logit_bias=json.dumps({"7": -100, "49": 2.5}),
    )
    assert found == Extras(True, True, 5, ((7, -100.0), (49, 2.5)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip_max_tokens", "yes"),
        ("return_token_ids", 1),
        ("top_log_probs", -1),
        ("top_log_probs", 21),
        ("top_log_probs", True),
        ("top_log_probs", "5"),
        ("logit_bias", 5),
        ("logit_bias", "{"),
        ("logit_bias", "[1]"),
        ("logit_bias", "[" * 100_000),
        ("logit_bias", '{"50": 1}'),
        ("logit_bias", '{"-1": 1}'),
        ("logit_bias", '{"²": 1}'),
        ("logit_bias", '{"1": 101}'),
        ("logit_bias", '{"1": NaN}'),
        ("logit_bias", '{"1": true}'),
        ("logit_bias", '{"' + "9" * 5000 + '": 1}'),
        ("logit_bias", '{"1": ' + "9" * 400 + "}"),
        ("logit_bias", json.dumps({str(i): 1 for i in range(2000)})),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        extras(**{name: value})
    assert caught.value.field == name


def test_max_tokens_is_clipped_only_when_asked() -> None:
    clip = Extras(clip_max_tokens=True)
    assert read(2**31 - 1, clip).max_tokens == 17
    assert read(4, clip).max_tokens == 4
    small_cache = dataclasses.replace(LIMITS, kv_cache_tokens=9)
    assert read(100, clip, small_cache).max_tokens == 6
    with pytest.raises(InvalidRequestError):
        read(18, Extras())
    full = dataclasses.replace(LIMITS, max_context_len=3)
    with pytest.raises(InvalidRequestError, match="context limit"):
        read(100, clip, full)


def test_a_guide_is_compiled_or_refused() -> None:
    regex = {
        "guided_decoding_guide_type": column(np.object_, b"regex"),
        "guided_decoding_guide": column(np.object_, b"ab"),
    }
    with pytest.raises(UnsupportedTensorError):
        read(4, Extras(), **regex)
    limits = dataclasses.replace(LIMITS, guides=GuideCompiler(FILE, TOKENIZER.vocab_size, [1]))
    assert read(4, Extras(), limits, **regex).guide is not None
    empty = {name: column(np.object_, b"") for name in regex}
    assert read(4, Extras(), limits, **empty).guide is None


def test_tokens_after_the_one_that_completes_a_stop_string_are_not_reported() -> None:
    ids = [i for i in TOKENIZER.encode("one two three") if i != TOKENIZER.bos_token_id]
    options = TextOptions(stream=True, stop=("two",), return_token_ids=True, top_log_probs=2)
    text = TextStream(TOKENIZER, options)
    tops = tuple(((token, -0.5), (0, -1.5)) for token in ids)
    text.push(ids, [-0.5] * len(ids), None, tops)
    piece = text.take()
    assert text.finish_reason is FinishReason.STOP
    count = text.num_output_tokens
    assert TOKENIZER.decode(ids[:count]).endswith("two")
    tensors = token_tensors(piece, options)
    assert tensors["output_token_ids"].tolist() == [[ids[:count]]]
    assert tensors["top_token_ids"].tolist() == [[[token, 0] for token in ids[:count]]]
    assert tensors["top_log_probs"].shape == (1, count, 2)
    assert token_tensors(piece, TextOptions(stream=True)) == {}
