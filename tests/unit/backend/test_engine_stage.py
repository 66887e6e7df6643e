from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deepseek_triton.backend import engine_stage, replies
from deepseek_triton.backend.engine_stage import EngineStage
from deepseek_triton.backend.opening import EngineLimits
from deepseek_triton.backend.packet import StepPacket
from deepseek_triton.errors import (
    EngineDeadError,
    EngineMismatchError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
)
from deepseek_triton.request import FinishReason, RequestKey, RequestStats
from tests.unit.backend.fakes import (
    FINAL,
    FakeEngine,
    FakeRequest,
    FakeResponse,
    FakeSender,
    column,
    fake_pb,
    output,
)

ARGS = {"model_config": json.dumps({"parameters": {"engine_dir": {"string_value": "/engine"}}})}
LIMITS = EngineLimits(vocab_size=50, max_context_len=20, end_ids=(1,))


class Server:
    def __init__(self) -> None:
        pb, self.utils = fake_pb()
        self.engine = FakeEngine()
        self.exit_codes: list[int] = []
        self.stage = EngineStage(pb, self.start_engine, exit_process=self.exit_codes.append)
        self.stage.initialize(ARGS)

    def start_engine(self, config: object, on_death: Callable[[], object]) -> Any:
        self.engine_dies = on_death
        return self.engine, LIMITS

    def send(self, *, request_id: str = "", parameters: Any = None, **tensors: Any) -> FakeSender:
        arrays = {
            "input_ids": column(np.int32, 5, 6),
            "input_lengths": np.array([2], np.int32),
            "request_output_len": np.array([4], np.int32),
            **tensors,
        }
        request = FakeRequest(arrays, request_id=request_id, parameters=parameters)
        self.stage.execute([request])
        return request.sender

    def ensemble(self, key: str = "key", **tensors: Any) -> FakeSender:
        return self.send(request_key=column(object, key), **tensors)

    @property
    def key(self) -> RequestKey:
        return self.engine.request.request_key


@pytest.fixture
def server():
    server = Server()
    yield server
    server.stage.finalize()


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.002)


def packets(sender: FakeSender) -> list[StepPacket]:
    return [StepPacket.from_tensor(r.tensors["step_packet"]) for r in sender.responses]


def ids(response: FakeResponse) -> list[int]:
    array = response.tensors["output_ids"]
    assert array.shape[:2] == (1, 1) and response.tensors["sequence_length"] == array.shape[2]
    return array.reshape(-1).tolist()


def test_a_step_of_the_ensemble_gets_tokens_and_packets(server: Server) -> None:
    sender = server.ensemble(
        streaming=column(np.bool_, True), stop_words=column(object, "x"),
        return_log_probs=column(np.bool_, True),
    )  # fmt: skip
    assert server.key == "key" and server.engine.request.end_id == 1
    server.engine.emit(output("key", 0, (7,), log_probs=(-0.5,)))
    server.engine.emit(output("key", 1, (), FinishReason.STOP))
    wait_for(lambda: sender.finals)
    assert [ids(r) for r in sender.responses] == [[7], []]
    first, last = packets(sender)
    assert first.options is not None
    assert (first.options.stream, first.options.stop, first.options.echo_ids) == (True, ("x",), ())
    assert (first.index, first.log_probs, first.finish_reason) == (0, (-0.5,), None)
    assert (last.index, last.options, last.finish_reason) == (1, None, FinishReason.STOP)


def test_an_error_of_the_engine_travels_in_the_last_packet(server: Server) -> None:
    sender = server.ensemble()
    error = RequestFailedError("key", "no finite logits")
    server.engine.emit(output("key", 0, (), FinishReason.ERROR, error=error))
    wait_for(lambda: sender.finals)
    (packet,) = packets(sender)
    assert packet.finish_reason is FinishReason.ERROR
    assert "no finite logits" in packet.error
    assert packet.error_status == "INTERNAL"


def test_a_silent_request_of_the_ensemble_sends_an_empty_packet(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepseek_triton.backend.outbox._BEAT_S", 0.01)
    sender = server.ensemble(streaming=column(np.bool_, True))
    wait_for(lambda: len(sender.responses) >= 2)
    server.engine.emit(output("key", 0, (7,), FinishReason.LENGTH))
    wait_for(lambda: sender.finals)
    found = packets(sender)
    assert [p.index for p in found] == list(range(len(found)))
    assert [p.options is not None for p in found] == [True] + [False] * (len(found) - 1)
    assert [ids(r) for r in sender.responses[:2]] == [[], []]


def test_a_direct_call_gets_all_ids_in_one_response(server: Server) -> None:
    sender = server.send()
    for i in range(3):
        last = FinishReason.LENGTH if i == 2 else None
        server.engine.emit(output(server.key, i, (7 + i,), last, num_output_tokens=i + 1))
    wait_for(lambda: sender.finals)
    (response,) = sender.responses
    assert ids(response) == [5, 6, 7, 8, 9], "the prompt is echoed"
    assert response.finish_reason == "length"
    assert response.tensors["num_output_tokens"] == 3
    assert response.tensors["output_log_probs"].tolist() == [[[0.0]]]


def test_a_direct_stream_gets_a_response_for_each_output(server: Server) -> None:
    sender = server.send(
        streaming=column(np.bool_, True),
        return_log_probs=column(np.bool_, True),
        return_perf_metrics=column(np.bool_, True),
    )
    server.engine.emit(output(server.key, 0, (7,), log_probs=(-0.5,), cum_log_prob=-0.5))
    stats = RequestStats(arrival_time_ns=2**60, kv_blocks_allocated=3)
    server.engine.emit(output(server.key, 1, (8,), FinishReason.LENGTH, log_probs=(-0.25,),
                              cum_log_prob=-0.75, stats=stats))  # fmt: skip
    wait_for(lambda: sender.finals)
    first, last = sender.responses
    assert (ids(first), ids(last)) == ([7], [8])
    assert first.tensors["output_log_probs"].tolist() == [[[-0.5]]]
    assert last.tensors["cum_log_probs"].tolist() == [[-0.75]]
    assert (first.finish_reason, last.finish_reason) == ("", "length")
    assert last.tensors["arrival_time_ns"] == 2**60
    assert last.tensors["kv_cache_alloc_new_blocks"] == 3


def test_only_outputs_that_somebody_reads_are_made(server: Server) -> None:
    request = FakeRequest(
        {"input_ids": column(np.int32, 5), "input_lengths": np.ones(1, np.int32),
         "request_output_len": np.ones(1, np.int32)}, wanted={"output_ids"},
    )  # fmt: skip
    server.stage.execute([request])
    server.engine.emit(output(server.key, 0, (7,), FinishReason.LENGTH))
    wait_for(lambda: request.sender.finals)
    assert set(request.sender.responses[0].tensors) == {"output_ids"}


def test_a_direct_call_that_fails_ends_with_an_error(server: Server) -> None:
    sender = server.send()
    error = EngineDeadError("the engine stopped")
    server.engine.emit(output(server.key, 0, (), FinishReason.ERROR, error=error))
    wait_for(lambda: sender.finals)
    assert (sender.error.message, sender.error.code) == ("the engine stopped", "UNAVAILABLE")


def test_a_cancelled_direct_call_is_aborted_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepseek_triton.backend.outbox._BEAT_S", 0.01)
    monkeypatch.setattr(replies, "_POLL_S", 0.0)
    sender = server.send()
    sender.cancelled = True
    wait_for(lambda: server.engine.aborted)
    server.engine.emit(output(server.key, 0, (7,)))
    server.engine.emit(output(server.key, 1, (), FinishReason.CANCELLED))
    wait_for(lambda: sender.finals)
    assert server.engine.aborted == [server.key]


def test_stop_ends_a_request_by_key_or_by_the_clients_id(server: Server) -> None:
    server.ensemble("key")
    sender = server.send(stop=np.ones(1, np.bool_), request_key=column(object, "key"))
    assert server.engine.aborted == ["key"]
    assert (sender.finals, sender.responses) == (1, [])
    direct = server.send(request_id="mine")
    own_key = next(key for key in server.engine.requests if key != "key")
    server.send(request_id="mine", stop=np.ones(1, np.bool_))
    assert server.engine.aborted == ["key", own_key]
    server.engine.emit(output(own_key, 0, (), FinishReason.CANCELLED))
    wait_for(lambda: direct.finals)
    server.send(request_id="mine", stop=np.ones(1, np.bool_))
    assert server.engine.aborted == ["key", own_key], "an ended request's id is forgotten"


def test_stop_ends_every_request_of_a_clients_id(server: Server) -> None:
    first, second, other = (server.send(request_id=name) for name in ("mine", "mine", "other"))
    keys = list(server.engine.requests)
    server.send(request_id="mine", stop=np.ones(1, np.bool_))
    assert server.engine.aborted == keys[:2]
    server.engine.emit(output(keys[1], 0, (), FinishReason.CANCELLED))
    wait_for(lambda: second.finals)
    server.send(request_id="mine", stop=np.ones(1, np.bool_))
    assert server.engine.aborted == [*keys[:2], keys[0]], "only the one that still runs"
    assert not first.finals and not other.finals


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"finish_reason": "stop"}, FinishReason.STOP),
        ({"finish_reason": ["stop"]}, FinishReason.CANCELLED),
        ({}, FinishReason.CANCELLED),
    ],
)
def test_stop_says_why(server: Server, parameters: Any, reason: FinishReason) -> None:
    server.ensemble("key", stop=np.ones(1, np.bool_), parameters=parameters)
    assert server.engine.abort_reasons == [reason]


def test_a_key_in_use_is_refused_and_its_owner_gets_its_answer(server: Server) -> None:
    first, second = server.ensemble("key"), server.ensemble("key", input_ids=column(np.int32, 7, 8))
    assert second.error.message.startswith("request_key: key is in use")
    server.engine.emit(output("key", 0, (7,), FinishReason.LENGTH))
    wait_for(lambda: first.finals)
    assert [ids(response) for response in first.responses] == [[7]]
    assert server.engine.request.prompt_token_ids == (5, 6)


def test_the_process_leaves_once_when_a_dead_engines_requests_are_answered(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_stage, "_LEAVE_S", 0.05)
    senders = [server.send(), server.send()]
    error = EngineDeadError("the engine stopped")
    for key in list(server.engine.requests):
        server.engine.emit(output(key, 0, (), FinishReason.ERROR, error=error))
    server.engine_dies()
    wait_for(lambda: server.exit_codes)
    assert [sender.error.message for sender in senders] == ["the engine stopped"] * 2
    time.sleep(0.1)
    assert server.exit_codes == [1]
    assert [record.levelname for record in caplog.records].count("CRITICAL") == 1


def test_stop_without_a_name_is_an_error(server: Server) -> None:
    assert "request_key" in server.send(stop=np.ones(1, np.bool_)).error.message


def test_a_deadline_comes_as_a_request_parameter(server: Server) -> None:
    before = time.monotonic_ns()
    server.send(parameters={"deadline_ms": 1500})
    assert 0 <= server.engine.request.deadline_ns - before - 1_500_000_000 < 1_000_000_000
    for bad in (0, "soon", True, 10**12, 1.5):
        assert server.send(parameters={"deadline_ms": bad}).error.message.startswith("deadline_ms")


def test_a_refused_request_names_the_field_as_its_sender_spells_it(server: Server) -> None:
    bad = {"runtime_top_p": column(np.float32, 1.5)}
    assert server.send(**bad).error.message.startswith("runtime_top_p: 1.5")
    sender = server.ensemble(**bad)
    assert sender.error.message.startswith("top_p: 1.5")
    assert (sender.error.code, sender.finals) == ("INVALID_ARG", FINAL)
    assert not server.engine.requests


@pytest.mark.parametrize(
    ("refusal", "message", "code"),
    [
        (InvalidRequestError("max_tokens", "too many"), "request_output_len: too many",
         "INVALID_ARG"),
        (OverloadedError("full"), "full", "UNAVAILABLE"),
        (EngineDeadError("dead"), "dead", "UNAVAILABLE"),
    ],
)  # fmt: skip
def test_the_engines_refusal_is_answered_at_once(
    server: Server, refusal: Exception, message: str, code: str
) -> None:
    server.engine.refusal = refusal
    sender = server.send(request_id="mine")
    assert (sender.error.message, sender.error.code, sender.finals) == (message, code, 1)
    server.send(request_id="mine", stop=np.ones(1, np.bool_))
    assert server.engine.aborted == []


def test_one_bad_request_of_a_batch_leaves_the_others(server: Server) -> None:
    good = FakeRequest({"input_ids": column(np.int32, 5), "input_lengths": np.ones(1, np.int32),
                        "request_output_len": np.ones(1, np.int32)})  # fmt: skip
    bad = FakeRequest({"input_lengths": np.ones(1, np.int32)})
    server.stage.execute([bad, good])
    assert bad.sender.error.code == "INVALID_ARG"
    assert not good.sender.finals and server.key


def test_refused_requests_count_as_failed(server: Server) -> None:
    failed = server.utils.families["deepseek_triton_requests_failed_total"]
    for _ in range(3):
        server.send(request_output_len=np.zeros(1, np.int32))
    wait_for(lambda: failed.samples[(("stage", "engine"),)] == 3)


def test_an_engine_that_does_not_load_fails_the_load() -> None:
    def refuse(config: object, on_death: object) -> Any:
        raise EngineMismatchError("rebuild it")

    pb, _ = fake_pb()
    with pytest.raises(EngineMismatchError, match="rebuild it"):
        EngineStage(pb, refuse).initialize(ARGS)


def test_finalize_closes_the_engine() -> None:
    server = Server()
    server.stage.finalize()
    assert server.engine.closed
