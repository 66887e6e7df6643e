"""The Engine seam, and the engine that steps our own scheduler and a ModelRunner."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from deepseek_triton.config import SchedulerConfig
from deepseek_triton.engine.admission import Admission
from deepseek_triton.engine.delivery import Deliveries, Delivery
from deepseek_triton.engine.state import Emit, RequestState
from deepseek_triton.errors import DeepseekTritonError, RequestFailedError
from deepseek_triton.log import request_logger
from deepseek_triton.metrics import EngineStats
from deepseek_triton.request import FinishReason, Request, RequestKey, TokenOutput, TopLogProbs
from deepseek_triton.runner.base import (
    FollowingRow,
    ModelRunner,
    Speculation,
    StepResult,
    WaitingRunner,
)
from deepseek_triton.scheduler import ScheduledRow, ScheduledStep, Scheduler

_logger = logging.getLogger(__name__)
_NOTHING_MORE = Speculation()


class Engine(Protocol):
    """Takes requests, yields their tokens. Engines with a scheduler of their own fit as well."""

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted and make progress."""

    def submit(self, request: Request, emit: Emit) -> None:
        """Accept a request, whose outputs then go to `emit`; exactly one has a finish_reason.

        Raises InvalidRequestError, OverloadedError or EngineDeadError; `emit` is not called then.
        """

    def abort(self, request_key: RequestKey, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End a request with `reason`; False, and nothing happens, if unknown."""

    def stats(self) -> EngineStats:
        """Return counts and gauges of this moment."""

    def close(self) -> None:
        """Cancel what runs and free the model; idempotent."""


class StepEngine:
    """An Engine that works when `step` is called: schedule → run → update. Not thread-safe."""

    def __init__(
        self,
        runner: ModelRunner,
        config: SchedulerConfig | None = None,
        *,
        max_context_len: int | None = None,
        deliver: Callable[[Deliveries], None] | None = None,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`deliver` takes each step's outputs; by default the receivers are called at once.

        A runner that waits for a device gives it the outputs of the step before meanwhile: a thread
        that sends them would take the interpreter from one that launches the next step.

        `max_context_len` bounds prompt and output tokens together; None leaves it to the KV cache.
        """
        config = config or SchedulerConfig()
        self._runner = runner
        self._waiting = runner if isinstance(runner, WaitingRunner) else None
        self._scheduler = Scheduler(
            config, runner.kv_cache_spec, runner.num_blocks, ahead=self._waiting is not None
        )
        self.admission = Admission(
            vocab_size=runner.vocab_size,
            max_context_len=max_context_len,
            kv_cache=runner.kv_cache_spec,
            num_blocks=runner.num_blocks,
            max_requests=config.max_batch_size + config.max_waiting,
        )
        self._deliver = deliver or Delivery(self.abort)
        self._sends_late = deliver is not None and self._waiting is not None
        if self._waiting is not None and self._sends_late:
            self._waiting.meanwhile = self._flush
        self._monotonic_ns = monotonic_ns
        self._states: dict[RequestKey, RequestState] = {}
        self._outbox: list[tuple[Emit, TokenOutput]] = []
        self._finished: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self._prompt_tokens = self._tokens = self._steps = 0
        self._drafts = self._right_drafts = 0
        self._step_seconds = self._runner_seconds = 0.0
        self._closed = False

    @property
    def is_alive(self) -> bool:
        """Whether the model is loaded."""
        return not self._closed

    @property
    def has_requests(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._states)

    def prepare(self, request: Request, emit: Emit) -> RequestState:
        """Validate `request` and build its state; thread-safe. Raises InvalidRequestError."""
        self.admission.check(request)
        return RequestState(request, emit)

    def submit(self, request: Request, emit: Emit) -> None:
        """Queue a request; see Engine."""
        self.admit(self.prepare(request, emit))

    def admit(self, state: RequestState) -> None:
        """Queue a prepared request. Raises InvalidRequestError or OverloadedError."""
        request = state.request
        num_prompt = len(request.prompt_token_ids)
        self._scheduler.add(request.request_key, num_prompt, request.max_tokens)
        self._states[request.request_key] = state
        self._prompt_tokens += num_prompt
        request_logger(_logger, request.request_key).debug(
            "queued: %d prompt tokens, at most %d more", num_prompt, request.max_tokens
        )

    def abort(self, request_key: RequestKey, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End a request early; see Engine."""
        state = self._states.get(request_key)
        if state is None:
            return False
        self._finish(state, reason)
        self._flush()
        return True

    def step(self) -> None:
        """Form one step, run it, and send each request what it got. Nothing to do: returns at once.

        A failure of the runner that names a request ends that one; any other is raised, and the
        caller ends all with `fail_all`.
        """
        started = time.perf_counter()
        self._expire()
        if self._states:
            step = self._scheduler.schedule()
            for key in step.preempted:
                request_logger(_logger, key).info("preempted: the KV cache is full")
            result = self._run(step)
            if result is not None:
                self._update(step, result)
        if not (self._sends_late and self._states):
            self._flush()
        self._step_seconds += time.perf_counter() - started

    def fail_all(self, error: DeepseekTritonError) -> None:
        """End every request with FinishReason.ERROR and `error`."""
        for state in list(self._states.values()):
            self._finish(state, FinishReason.ERROR, error=error)
        self._flush()

    def cancel_all(self) -> None:
        """End every request with FinishReason.CANCELLED."""
        for state in list(self._states.values()):
            self._finish(state, FinishReason.CANCELLED)
        self._flush()

    def stats(self) -> EngineStats:
        """Return counts and gauges; may be called from any thread, then each value by itself."""
        return EngineStats(
            requests_active=self._scheduler.num_running,
            requests_waiting=self._scheduler.num_waiting,
            kv_blocks_total=self._scheduler.num_blocks,
            kv_blocks_used=self._scheduler.num_blocks_used,
            preemptions_total=self._scheduler.num_preemptions,
            prompt_tokens_total=self._prompt_tokens,
            tokens_generated_total=self._tokens,
            draft_tokens_total=self._drafts,
            draft_tokens_accepted_total=self._right_drafts,
            requests_finished_total=dict(self._finished),
            steps_total=self._steps,
            step_seconds_total=self._step_seconds,
            runner_seconds_total=self._runner_seconds,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariants between two steps hold."""
        self._scheduler.check_integrity()
        if self._scheduler.num_running + self._scheduler.num_waiting != len(self._states):
            raise AssertionError("engine and scheduler hold different requests")

    def close(self) -> None:
        """Cancel what runs and free the model; idempotent."""
        if not self._closed:
            self._closed = True
            self.cancel_all()
            self._runner.close()

    def _expire(self) -> None:
        now = self._monotonic_ns()
        for state in [s for s in self._states.values() if s.deadline_ns <= now]:
            request_logger(_logger, state.request.request_key).info("ended: deadline passed")
            self._finish(state, FinishReason.CANCELLED)

    def _run(self, step: ScheduledStep) -> StepResult | None:
        """Run `step`; None when one request was at fault and has ended: the rest runs again."""
        if not step.rows:
            raise RuntimeError("requests are queued, but no step could be formed")
        now_ns = time.time_ns()
        rows = []
        for row in step.rows:
            state = self._states[row.request_key]
            state.first_scheduled_time_ns = state.first_scheduled_time_ns or now_ns
            rows.append(state.step_row(row))
        started = time.perf_counter()
        try:
            if self._waiting is not None:
                return self._waiting.run(tuple(rows), self._following(step))
            return self._runner.run(tuple(rows))
        except RequestFailedError as error:
            failed = self._states.get(RequestKey(error.request_key))
            if failed is None:
                raise
            self._finish(failed, FinishReason.ERROR, error=error)
            return None
        finally:
            self._steps += 1
            self._runner_seconds += time.perf_counter() - started

    def _following(self, step: ScheduledStep) -> tuple[FollowingRow, ...]:
        """Return the decode rows of the step after `step`; () if their tokens must be known first.

        Or if there is no block yet for one of these tokens.
        """
        following = []
        size = self._runner.kv_cache_spec.block_size
        for index, row in enumerate(step.rows):
            state = self._states[row.request_key]
            if not row.samples or state.num_left == 1:
                continue
            room = len(row.block_table) * size - row.context_len - row.num_tokens
            if not room or not state.may_follow_unseen:
                return ()
            following.append(FollowingRow(index, state.following_row(row)))
        return tuple(following)

    def _update(self, step: ScheduledStep, result: StepResult) -> None:
        now_ns = time.time_ns()
        if result.speculation:
            pairs = list(zip(step.rows, result.speculation, strict=True))
            self._scheduler.commit(
                step,
                {row.request_key: len(more.token_ids) for row, more in pairs},
                {row.request_key: len(self._usable_drafts(row, more)) for row, more in pairs},
            )
        else:
            pairs = [(row, _NOTHING_MORE) for row in step.rows]
            self._scheduler.commit(step)
        tops = result.top_log_probs or ((),) * len(step.rows)
        firsts = zip(result.token_ids.tolist(), result.log_probs.tolist(), tops, strict=True)
        for index, ((row, more), (token_id, log_prob, top)) in enumerate(
            zip(pairs, firsts, strict=True)
        ):
            self._drafts += row.num_drafts
            self._right_drafts += len(more.token_ids)
            state = self._states[row.request_key]
            if index in result.overflowed:
                error = _not_finite(state, "hidden states are not finite, most likely an overflow")
                self._finish(state, FinishReason.ERROR, error=error)
            elif row.samples:
                state.draft_token_ids = self._usable_drafts(row, more)
                drawn = [(token_id, log_prob)]
                drawn += zip(more.token_ids, more.log_probs, strict=True)
                self._take_tokens(state, drawn, top, now_ns)

    def _usable_drafts(self, row: ScheduledRow, more: Speculation) -> tuple[int, ...]:
        return more.draft_token_ids if self._states[row.request_key].takes_drafts else ()

    def _take_tokens(
        self,
        state: RequestState,
        drawn: Sequence[tuple[int, float]],
        top: TopLogProbs,
        now_ns: int,
    ) -> None:
        """Give a request the tokens that a step drew, with log probs, up to the one that ends it.

        `top` are the likeliest tokens in place of the first.
        """
        kept, reason, error = 0, None, None
        for token_id, log_prob in drawn:
            if token_id < 0:
                reason = FinishReason.ERROR
                error = _not_finite(
                    state, "the model gave no finite logits, most likely an overflow"
                )
            elif state.ends_with(token_id):
                reason = FinishReason.STOP
            else:
                kept += 1
                if state.append(token_id, log_prob, now_ns):
                    reason = FinishReason.LENGTH
                if state.guide is not None:
                    reason, error = self._follow_guide(state, token_id, reason)
            if reason is not None:
                break
        self._tokens += kept
        sampling = state.request.sampling
        token_ids = tuple(token_id for token_id, _ in drawn[:kept])
        log_probs = tuple(p for _, p in drawn[:kept]) if sampling.return_log_probs else ()
        tops = (top,) if sampling.top_log_probs and kept else ()
        if reason is not None:
            self._finish(state, reason, token_ids, log_probs, error, tops)
        else:
            progress = self._scheduler.progress(state.request.request_key)
            output = state.output(progress, token_ids, log_probs, top_log_probs=tops)
            self._outbox.append((state.emit, output))

    def _follow_guide(
        self, state: RequestState, token_id: int, reason: FinishReason | None
    ) -> tuple[FinishReason | None, RequestFailedError | None]:
        """Tell a request's guide of its newest token; return why the request ends, if it does."""
        if state.guide is None:
            return reason, None
        problem = state.guide.accept(token_id)
        if problem:
            message = f"the answer cannot be kept to its form: {problem}"
            return FinishReason.ERROR, RequestFailedError(state.request.request_key, message)
        return (FinishReason.STOP if state.guide.is_complete else reason), None

    def _finish(
        self,
        state: RequestState,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        log_probs: tuple[float, ...] = (),
        error: DeepseekTritonError | None = None,
        top_log_probs: tuple[TopLogProbs, ...] = (),
    ) -> None:
        """Forget a request, free its blocks and put its last output into the outbox."""
        key = state.request.request_key
        progress = self._scheduler.progress(key)
        self._scheduler.remove(key)
        del self._states[key]
        self._finished[reason.value] += 1
        output = state.output(progress, token_ids, log_probs, reason, error, top_log_probs)
        self._outbox.append((state.emit, output))
        log = request_logger(_logger, key)
        if error is not None:
            log.warning("failed after %d tokens: %s", state.num_output, error)
        else:
            log.debug("finished after %d tokens: %s", state.num_output, reason.value)

    def _flush(self) -> None:
        if self._outbox:
            deliveries, self._outbox = self._outbox, []
            self._deliver(deliveries)


def _not_finite(state: RequestState, problem: str) -> RequestFailedError:
    return RequestFailedError(
        state.request.request_key,
        f"{problem}; build the engine with PRECISION=fp32, or bf16 where the target has it (if it "
        "is: a weight of the checkpoint is not finite)",
    )
