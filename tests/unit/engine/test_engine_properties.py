"""Random lives of an engine with a tiny cache: every request gets what it would get alone."""

from functools import cache

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepseek_triton.config import SchedulerConfig
from deepseek_triton.engine.engine import StepEngine
from deepseek_triton.request import FinishReason, Request, RequestKey, SamplingParams
from tests.unit.engine.scripted_runner import AheadRunner, Collector, ScriptedRunner

VOCAB_SIZE = 12
BLOCK_SIZE = 4
END_ID = 3
AHEAD = -1  # no drafts, but steps that are launched early

samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 4]),
    top_p=st.sampled_from([1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    min_tokens=st.sampled_from([0, 3]),
    seed=st.integers(0, 2**64 - 1),
    return_log_probs=st.booleans(),
)
prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9).map(tuple)
wishes = st.tuples(
    prompts,
    st.integers(1, 20),
    samplings,
    st.sampled_from([None, END_ID]),
    st.sampled_from([None, None, None, 5]),  # patience in steps
)


@cache
def alone(prompt, max_tokens, sampling, end_id):
    """Tokens, log probs and finish reason of a request with an engine for itself."""
    engine, taken = StepEngine(ScriptedRunner(16, BLOCK_SIZE, VOCAB_SIZE)), Collector()
    engine.submit(Request(RequestKey("alone"), prompt, max_tokens, sampling, end_id), taken)
    while engine.has_requests:
        engine.step()
    return taken.tokens, taken.log_probs, taken.finish_reason


class EngineLife(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(7, 9),
        max_batch_size=st.integers(1, 6),
        more_tokens=st.integers(0, 9),
        num_drafts=st.one_of(st.integers(0, 3), st.just(AHEAD)),
    )
    def start(self, num_blocks, max_batch_size, more_tokens, num_drafts):
        if num_drafts == AHEAD:
            self.runner = AheadRunner(num_blocks, BLOCK_SIZE, VOCAB_SIZE)
        else:
            self.runner = ScriptedRunner(num_blocks, BLOCK_SIZE, VOCAB_SIZE, num_drafts)
        config = SchedulerConfig(
            max_batch_size=max_batch_size,
            max_tokens_per_step=max_batch_size + more_tokens,
            max_waiting=1000,
        )
        self.now_ns = 0
        self.engine = StepEngine(self.runner, config, monotonic_ns=lambda: self.now_ns)
        self.taken: list[tuple[Request, Collector]] = []
        self.ended_early: set[RequestKey] = set()

    @rule(batch=st.lists(wishes, min_size=1, max_size=5))
    def submit(self, batch):
        for prompt, max_tokens, sampling, end_id, patience in batch:
            deadline_ns = None if patience is None else self.now_ns + patience
            key = RequestKey(str(len(self.taken)))
            request = Request(key, prompt, max_tokens, sampling, end_id, deadline_ns)
            self.taken.append((request, Collector()))
            self.engine.submit(*self.taken[-1])

    @precondition(lambda self: self.engine.has_requests)
    @rule(data=st.data())
    def abort(self, data):
        live = [r.request_key for r, taken in self.taken if taken.finish_reason is None]
        key = data.draw(st.sampled_from(live))
        assert self.engine.abort(key)
        self.ended_early.add(key)

    @rule(steps=st.integers(1, 12))
    def step(self, steps):
        for _ in range(steps):
            self.advance()

    def advance(self):
        self.now_ns += 1
        self.engine.step()
        self.engine.check_integrity()

    @invariant()
    def every_prefix_is_that_of_the_request_alone(self):
        for request, taken in self.taken:
            tokens, log_probs, reason = alone(
                request.prompt_token_ids, request.max_tokens, request.sampling, request.end_id
            )
            assert taken.tokens == tokens[: len(taken.tokens)]
            assert taken.log_probs == log_probs[: len(taken.log_probs)]
            if taken.finish_reason not in (None, FinishReason.CANCELLED):
                assert (taken.tokens, taken.finish_reason) == (tokens, reason)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(sum(request.max_tokens + 30 for request, _ in self.taken)):
            if not self.engine.has_requests:
                break
            self.advance()
        assert not self.engine.has_requests, "no progress"
        self.every_prefix_is_that_of_the_request_alone()
        assert self.engine.stats().kv_blocks_used == 0
        for request, taken in self.taken:
            early = request.request_key in self.ended_early or request.deadline_ns is not None
            assert taken.finish_reason is not None
            assert early or taken.finish_reason is not FinishReason.CANCELLED


EngineLife.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestEngineLife = EngineLife.TestCase
