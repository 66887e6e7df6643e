from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepseek_triton.backend.pb import Pb
from deepseek_triton.backend.preprocessing import Preprocessing, PromptReader
from tests.unit.backend.fakes import TOKENIZER, FakeRequest, FakeResponse, column, fake_pb


def started(pb: Pb) -> Preprocessing:
    model = Preprocessing(pb)
    model.start(PromptReader(TOKENIZER, max_context_len=100))
    return model


def ask(
    text: str | bytes = "How are you?", max_tokens: int = 5, *, wanted: set[str] | None = None,
    model: Preprocessing | None = None, **more: Any,
) -> FakeResponse:  # fmt: skip
    model = model or started(fake_pb()[0])
    tensors = {
        "QUERY": column(object, text),
        "REQUEST_OUTPUT_LEN": column(np.int32, max_tokens),
        **more,
    }
    (response,) = model.execute([FakeRequest(tensors, wanted=wanted)])
    return response


def value(response: FakeResponse, name: str) -> Any:
    return response.tensors[name].reshape(-1)[0]


def test_a_prompt_becomes_ids() -> None:
    tensors = ask().tensors
    assert tensors["INPUT_ID"].tolist() == [TOKENIZER.encode("How are you?")]
    assert tensors["INPUT_ID"].dtype == np.int32
    assert tensors["REQUEST_INPUT_LEN"].tolist() == [[tensors["INPUT_ID"].size]]
    assert tensors["REQUEST_OUTPUT_LEN"].tolist() == [[5]]


def test_every_request_gets_a_key_of_its_own() -> None:
    keys = {value(ask(), "REQUEST_KEY") for _ in range(10)}
    assert len(keys) == 10


def test_end_and_pad_id_are_the_clients_or_the_tokenizers() -> None:
    own = ask(END_ID=column(np.int32, 7), PAD_ID=column(np.int32, 8))
    assert (value(own, "OUT_END_ID"), value(own, "OUT_PAD_ID")) == (7, 8)
    assert value(ask(), "OUT_END_ID") == TOKENIZER.eos_token_id


def test_a_space_is_a_prompt() -> None:
    assert ask(" ").tensors["INPUT_ID"].tolist() == [TOKENIZER.encode(" ")]


def test_only_outputs_that_somebody_reads_are_made() -> None:
    assert set(ask(wanted={"INPUT_ID"}).tensors) == {"INPUT_ID"}


@pytest.mark.parametrize(
    ("fault", "field", "says"),
    [
        ({"text": ""}, "text_input", "empty"),
        ({"text": b"a\xff"}, "text_input", "UTF-8 at byte 1"),
        ({"text": "x" * 100_000}, "text_input", "context limit of 100"),
        ({"max_tokens": 0}, "max_tokens", "0"),
        ({"max_tokens": -1}, "max_tokens", "-1"),
        ({"QUERY": np.array([[b"a"], [b"b"]], object)}, "text_input", "one prompt per request"),
        ({"BAD_WORDS_DICT": column(object, "x")}, "bad_words", "not supported"),
        ({"DECODER_QUERY": column(object, "x")}, "decoder_text_input", "not supported"),
        ({"IMAGE_URL": column(object, "x")}, "IMAGE_URL", "not supported"),
    ],
)
def test_a_fault_is_named_as_the_client_spells_it(
    fault: dict[str, Any], field: str, says: str
) -> None:
    error = ask(**fault).error
    assert error is not None
    assert error.message.startswith(f"{field}: ") and says in error.message
    assert error.code == "INVALID_ARG"


def test_refused_prompts_count_as_failed() -> None:
    pb, utils = fake_pb()
    model = started(pb)
    failed = utils.families["deepseek_triton_requests_failed_total"].samples
    for text in ("", "fine", ""):
        ask(text, model=model)
    assert failed == {(("stage", "preprocessing"),): 2}
