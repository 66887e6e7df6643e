from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from deepseek_triton.backend.packet import StepPacket, TextOptions
from deepseek_triton.backend.postprocessing import Postprocessing
from deepseek_triton.request import FinishReason, RequestStats
from tests.unit.backend.fakes import TOKENIZER, FakeRequest, FakeResponse, FakeSender, fake_pb

IDS = [i for i in TOKENIZER.encode("one two three") if i != TOKENIZER.bos_token_id]
LENGTH = FinishReason.LENGTH


class Server:
    """Feeds packets of requests to the model; time stands still unless a test moves it."""

    def __init__(self) -> None:
        pb, self.utils = fake_pb()
        self.now = 1000.0
        self.model = Postprocessing(pb, clock=lambda: self.now)
        self.model.start(TOKENIZER, longest_request_s=600)
        self.next_index: dict[str, int] = {}
        self.senders: list[FakeSender] = []

    def send(
        self,
        ids: list[int],
        reason: FinishReason | None = None,
        *,
        key: str = "k",
        options: TextOptions | None = None,
        cancelled: bool = False,
        **fields: Any,
    ) -> FakeRequest:
        index = self.next_index.get(key, 0)
        self.next_index[key] = index + 1
        options = (options or TextOptions(stream=True)) if index == 0 else None
        packet = StepPacket(key, index, options, finish_reason=reason, **fields)
        request = FakeRequest(
            {
                "TOKENS_BATCH": np.array([[ids]], np.int32),
                "SEQUENCE_LENGTH": np.array([[len(ids)]], np.int32),
                "STEP_PACKET": packet.to_tensor(),
            },
            cancelled=cancelled,
        )
        self.model.execute([request])
        assert request.sender.finals == 1, "each packet's request ends exactly once"
        self.senders.append(request.sender)
        return request

    def send_all(self, ids: list[int], **first: Any) -> None:
        for i, token_id in enumerate(ids):
            self.send(
                [token_id], LENGTH if i == len(ids) - 1 else None, **(first if i == 0 else {})
            )

    @property
    def responses(self) -> list[FakeResponse]:
        return [response for sender in self.senders for response in sender.responses]

    def aborted(self) -> list[str]:
        self.model.finalize()
        return self.utils.aborted


@pytest.fixture
def server() -> Server:
    return Server()


def test_a_stream_gets_a_response_for_each_token_and_one_reason(server: Server) -> None:
    server.send_all(IDS)
    assert [len(sender.responses) for sender in server.senders] == [1] * len(IDS)
    assert "".join(r.text for r in server.responses) == "one two three"
    assert [r.finish_reason for r in server.responses] == [""] * (len(IDS) - 1) + ["length"]
    assert server.model.num_conversations == 0
    assert server.aborted() == []


def test_without_a_stream_there_is_exactly_one_response(server: Server) -> None:
    server.send_all(IDS, options=TextOptions(stream=False, num_input_tokens=4))
    (response,) = server.responses
    assert (response.text, response.finish_reason) == ("one two three", "length")
    assert response.tensors["num_input_tokens"] == 4
    assert response.tensors["num_output_tokens"] == len(IDS)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_the_request_and_the_engines_work(server: Server, stream: bool) -> None:
    server.send_all(IDS, options=TextOptions(stream=stream, stop=(" two",)))
    assert "".join(r.text for r in server.responses) == "one"
    assert [r.finish_reason for r in server.responses if r.finish_reason] == ["stop"]
    assert server.responses[-1].finish_reason == "stop", "nothing comes after the stop string"
    assert server.model.num_conversations == 0
    assert server.aborted() == ["k"]
    assert server.utils.call_parameters == [{"finish_reason": "stop"}]


def test_a_stop_string_in_the_last_packet_needs_no_abort(server: Server) -> None:
    server.send(IDS, LENGTH, options=TextOptions(stream=True, stop=("three",)))
    (response,) = server.responses
    assert (response.text, response.finish_reason) == ("one two ", "stop")
    assert server.aborted() == []


@pytest.mark.parametrize("stream", [True, False])
def test_a_cancelled_client_is_reported_once_and_answered_no_more(
    server: Server, stream: bool
) -> None:
    server.send(IDS[:1], options=TextOptions(stream=stream))
    answered = len(server.responses)
    server.now += 1
    for _ in range(3):
        server.send(IDS[1:2], cancelled=True)
    assert server.model.num_conversations == 1, "the engine's last packet is still to come"
    server.send([], FinishReason.CANCELLED, cancelled=True)
    assert len(server.responses) == answered
    assert server.model.num_conversations == 0
    assert server.aborted() == ["k"]


def test_a_client_that_left_before_the_first_token_is_found_by_the_empty_packet(
    server: Server,
) -> None:
    server.send([], cancelled=True)
    server.send([], FinishReason.CANCELLED, cancelled=True)
    assert server.responses == []
    assert (server.model.num_conversations, server.aborted()) == (0, ["k"])
    assert server.utils.call_parameters == [{"finish_reason": "cancelled"}]


def test_an_empty_packet_is_no_response(server: Server) -> None:
    server.send([])
    server.send(IDS[:1])
    assert [len(sender.responses) for sender in server.senders] == [0, 1]


def test_triton_is_asked_about_cancellation_now_and_then_only(server: Server) -> None:
    polls = [server.send(IDS[:1]).cancel_polls for _ in range(5)]
    server.now += 1
    polls += [server.send(IDS[:1]).cancel_polls for _ in range(2)]
    assert polls == [1, 0, 0, 0, 0, 1, 0]


def test_a_deadline_gives_the_text_so_far(server: Server) -> None:
    server.send(IDS[:1], options=TextOptions(stream=False))
    server.send([], FinishReason.CANCELLED)
    (response,) = server.responses
    assert (response.text, response.finish_reason) == ("one", "cancelled")


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_of_the_engine_ends_with_an_error_response(server: Server, stream: bool) -> None:
    server.send(IDS[:1], options=TextOptions(stream=stream))
    server.send([], FinishReason.ERROR, error="no finite logits", error_status="UNAVAILABLE")
    error = server.senders[-1].error
    assert (error.message, error.code) == ("no finite logits", "UNAVAILABLE")
    if stream:
        assert server.responses[-2].finish_reason == "error"
    else:
        assert len(server.responses) == 1
    assert server.model.num_conversations == 0


def test_requests_do_not_mix(server: Server) -> None:
    for token_id in IDS[:2]:
        server.send([token_id], key="a", options=TextOptions(stream=False))
        server.send([token_id], key="b", options=TextOptions(stream=False, stop=(" two",)))
    server.send(IDS[2:], LENGTH, key="a")
    server.send(IDS[2:], LENGTH, key="b")
    assert [r.text for r in server.responses] == ["one", "one two three"]


def test_a_missing_output_is_an_error_and_no_text(server: Server) -> None:
    server.send(IDS[:1])
    server.next_index["k"] += 1
    server.send(IDS[2:3])
    assert "output 1 of the engine is missing, 2 came" in server.senders[-1].error.message
    server.send([], FinishReason.CANCELLED)
    assert server.model.num_conversations == 0
    assert server.aborted() == ["k"]


def test_late_packets_of_an_unknown_request_are_swallowed(server: Server) -> None:
    server.next_index["gone"] = 7
    server.send(IDS, LENGTH, key="gone")
    assert server.responses == [] and server.model.num_conversations == 0


def test_a_request_whose_last_packet_never_comes_is_dropped_in_the_end(server: Server) -> None:
    server.send(IDS[:1], key="lost")
    server.now += 600
    server.send(IDS[:1], key="other")
    assert server.model.num_conversations == 2, "the longest request may still be running"
    server.now += 121
    server.send(IDS[:1], key="other")
    assert server.model.num_conversations == 1


def test_log_probs_and_counts_come_with_each_response_when_asked_for(server: Server) -> None:
    options = TextOptions(stream=True, num_input_tokens=4, return_log_probs=True,
                          return_counts=True)  # fmt: skip
    server.send(IDS[:1], options=options, log_probs=(-0.5,))
    server.send(IDS[1:2], LENGTH, log_probs=(-0.25,))
    first, last = (response.tensors for response in server.responses)
    assert (first["output_log_probs"].tolist(), first["cum_log_probs"].tolist()) == (
        [[[-0.5]]],
        [[-0.5]],
    )
    assert (last["output_log_probs"].tolist(), last["cum_log_probs"].tolist()) == (
        [[[-0.25]]],
        [[-0.75]],
    )
    assert (first["num_output_tokens"], last["num_output_tokens"]) == (1, 2)
    assert first["num_input_tokens"] == 4


def test_a_plain_stream_carries_nothing_else_until_its_last_response(server: Server) -> None:
    server.send(IDS[:1])
    server.send(IDS[1:2], LENGTH, stats=RequestStats(last_token_time_ns=2**60))
    first, last = (response.tensors for response in server.responses)
    assert set(first) == {"OUTPUT", "finish_reason"}
    assert last["last_token_time_ns"] == 2**60
    assert last["sequence_index"].tolist() == [[0]]


@pytest.mark.parametrize(
    "content", [b"\0\0\0", b'{"key": [], "index": 0}', b'{"key": "k", "index": 0, "options": 1}']
)
def test_one_broken_packet_harms_nobody_else(
    server: Server, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    broken = FakeRequest({"TOKENS_BATCH": np.zeros((1, 1, 0), np.int32),
                          "STEP_PACKET": np.frombuffer(content, np.uint8)[np.newaxis]})  # fmt: skip
    server.model.execute([broken])
    assert broken.sender.error.code == "INVALID_ARG"
    assert not [record for record in caplog.records if record.exc_info]
    server.send_all(IDS)
    assert "".join(r.text for r in server.responses) == "one two three"


class TestWholeSequences:
    """Calls without a packet: the contract's own, stateless use of the model."""

    def decode(self, server: Server, tokens: np.ndarray, lengths: Any) -> FakeSender:
        request = FakeRequest(
            {"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": np.array(lengths, np.int32)}
        )
        server.model.execute([request])
        return request.sender

    def test_are_decoded_up_to_their_lengths(self, server: Server) -> None:
        tokens = np.full((2, 2, len(IDS)), -1, np.int32)
        tokens[0, 1], tokens[1, 0] = IDS, IDS
        sender = self.decode(server, tokens, [[0, len(IDS)], [1, 3]])
        texts = sender.responses[0].tensors["OUTPUT"]
        assert texts.tolist() == [[b"", b"one two three"], [b"one", b""]]

    @pytest.mark.parametrize("lengths", [[[1]], [[1, 99]], [[-1, 1]]])
    def test_lengths_must_fit(self, server: Server, lengths: list[list[int]]) -> None:
        sender = self.decode(server, np.zeros((1, 2, 3), np.int32), lengths)
        assert sender.error.message.startswith("SEQUENCE_LENGTH")


def test_an_abort_that_fails_does_not_stop_the_next(server: Server) -> None:
    server.utils.call_error = RuntimeError("no such model")
    server.send([], key="a", cancelled=True)
    deadline = time.monotonic() + 10
    while not server.model._aborter._aborts.empty() and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(0.02)
    server.utils.call_error = None
    server.send([], key="b", cancelled=True)
    assert server.aborted() == ["b"]
