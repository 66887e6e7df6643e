from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton.backend.packet import StepPacket, TextOptions
from deepseek_triton.request import FinishReason, RequestStats

INTS = st.integers(min_value=0, max_value=2**62)
OPTIONS = st.builds(
    TextOptions,
    stream=st.booleans(),
    stop=st.lists(st.text()).map(tuple),
    echo_ids=st.lists(INTS).map(tuple),
    num_input_tokens=INTS,
    return_log_probs=st.booleans(),
    return_counts=st.booleans(),
    return_token_ids=st.booleans(),
    top_log_probs=INTS,
)
PACKETS = st.builds(
    StepPacket,
    request_key=st.text(),
    index=INTS,
    options=st.none() | OPTIONS,
    log_probs=st.lists(st.floats(allow_nan=False)).map(tuple),
    top_log_probs=st.lists(
        st.lists(st.tuples(INTS, st.floats(allow_nan=False))).map(tuple), max_size=3
    ).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    error=st.text(min_size=1),
    error_status=st.sampled_from(["INTERNAL", "UNAVAILABLE"]),
    stats=st.none() | st.builds(RequestStats, arrival_time_ns=INTS, preemptions=INTS),
    flow=st.none() | st.tuples(INTS, INTS, INTS),
)


@settings(deadline=None)  # the machine may be busy
@given(PACKETS)
def test_a_packet_survives_its_tensor(packet: StepPacket) -> None:
    tensor = packet.to_tensor()
    assert tensor.dtype == np.uint8 and tensor.shape[0] == 1 and tensor.ndim == 2
    assert StepPacket.from_tensor(tensor) == packet


def test_the_packet_of_a_plain_token_is_small() -> None:
    assert StepPacket("0" * 32, 1000).to_tensor().size < 80


WRONG_VALUES = ([], {}, "", "x", 1, 1.5, True, None, [[]], ["", "x"], [None, 2])


@pytest.mark.parametrize(
    "field", ["key", "index", "log_probs", "finish_reason", "error", "stats", "flow"]
)
@pytest.mark.parametrize("wrong", WRONG_VALUES, ids=repr)
def test_a_field_of_another_type_is_an_error_or_harmless(field: str, wrong: object) -> None:
    content = json.loads(StepPacket("k", 0, TextOptions(stream=True)).to_tensor().tobytes())
    assert_hashable_or_refused({**content, field: wrong})


@pytest.mark.parametrize("option", [f.name for f in dataclasses.fields(TextOptions)])
@pytest.mark.parametrize("wrong", WRONG_VALUES, ids=repr)
def test_an_option_of_another_type_is_an_error_or_harmless(option: str, wrong: object) -> None:
    content = json.loads(StepPacket("k", 0, TextOptions(stream=True)).to_tensor().tobytes())
    assert_hashable_or_refused({**content, "options": {**content["options"], option: wrong}})


def assert_hashable_or_refused(content: object) -> None:
    """A packet is made of immutable values alone: what came from JSON unchecked is not."""
    tensor = np.frombuffer(json.dumps(content).encode(), np.uint8)[np.newaxis]
    try:
        packet = StepPacket.from_tensor(tensor)
    except (ValueError, KeyError, TypeError):
        return
    hash(packet)
    again = StepPacket.from_tensor(packet.to_tensor())
    assert repr(again) == repr(packet)
    assert type(packet.index) is int and type(packet.request_key) is str
    assert packet.options is None or type(packet.options.stream) is bool


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[1]",
        b"\xff",
        b"[" * 100_000,
        b'{"key": [], "index": 0}',
        b'{"key": "k", "index": "0"}',
        b'{"key": "k", "index": 0, "options": 1}',
        b'{"key": "k", "index": 0, "options": {"x": 1}}',
        b'{"key": "k", "index": 0, "finish_reason": []}',
        b'{"key": "k", "index": 0, "flow": [1, 2]}',
        b'{"key": "k", "index": 0, "flow": [1, 2, -1]}',
        b'{"key": "k", "index": 0, "flow": [1, 2, 9223372036854775808]}',
        b'{"key": "k", "index": 0, "error": ["message", "NO_STATUS"]}',
        b'{"key": "k", "index": 0, "stats": {"arrival_time_ns": "now"}}',
    ],
    ids=lambda content: content[:40],
)
def test_anything_else_is_an_error_of_a_known_kind(content: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        StepPacket.from_tensor(np.frombuffer(content, np.uint8)[np.newaxis])
