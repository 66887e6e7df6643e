"""Decode steps of the cuda runner that begin before their tokens are known, in plain PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deepseek_triton.build.engine_dir import EngineDir, load_engine_dir  # noqa: E402
from deepseek_triton.build.pipeline import build_engine  # noqa: E402
from deepseek_triton.checkpoint.presets import preset_config  # noqa: E402
from deepseek_triton.checkpoint.random import write_random_checkpoint  # noqa: E402
from deepseek_triton.config import SchedulerConfig  # noqa: E402
from deepseek_triton.engine.engine import StepEngine  # noqa: E402
from deepseek_triton.request import Request, RequestKey, SamplingParams  # noqa: E402
from deepseek_triton.runner.base import (  # noqa: E402
    FollowingRow,
    RowSampling,
    StepResult,
    StepRow,
)
from deepseek_triton.runner.cuda import CudaRunner  # noqa: E402

NO_TOKENS = np.zeros(0, np.int32)
GREEDY = RowSampling(SamplingParams(), 0.0, None, NO_TOKENS, NO_TOKENS)
DRAWN = dataclasses.replace(GREEDY, params=SamplingParams(temperature=1.0, top_k=9), uniform=0.7)
PROMPTS = {key: np.random.default_rng(i).integers(3, 4000, 6) for i, key in enumerate("abc")}
TABLES = {"a": [3], "b": [11], "c": [2]}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    folder = tmp_path_factory.mktemp("engine")
    write_random_checkpoint(folder / "checkpoint", preset_config("v2"))
    build_engine(folder / "checkpoint", folder / "cuda", target="cuda", block_size=16)
    return load_engine_dir(folder / "cuda")


class Counted(CudaRunner):
    """Counts the rows that it computes, beside those launched ahead."""

    num_computed = 0

    def _compute(self, rows, with_decodes=True):  # type: ignore[no-untyped-def]
        for indices, outputs in super()._compute(rows, with_decodes):
            self.num_computed += len(indices)
            yield indices, outputs


@pytest.fixture
def runner(engine: EngineDir) -> Iterator[Counted]:
    runner = Counted.open(engine, num_blocks=48, max_batch_size=4, device="cpu")
    yield runner
    runner.close()


@pytest.fixture
def other(engine: EngineDir) -> Iterator[Counted]:
    """For the same tokens, step by step."""
    runner = Counted.open(engine, num_blocks=48, max_batch_size=4, device="cpu")
    yield runner
    runner.close()


def row(key: str, begin: int, ids: list[int], sampling: RowSampling | None = GREEDY) -> StepRow:
    table = np.array(TABLES[key], np.int32)
    return StepRow(RequestKey(key), np.array(ids, np.int32), begin, table, sampling)


def whole(key: str, sampling: RowSampling | None = GREEDY) -> StepRow:
    return row(key, 0, PROMPTS[key].tolist(), sampling)


def ahead(source: int, key: str, begin: int = 6, sampling: RowSampling = GREEDY) -> FollowingRow:
    return FollowingRow(source, row(key, begin, [0], sampling))


def same(got: StepResult, want: StepResult) -> None:
    assert got.token_ids.tolist() == want.token_ids.tolist()
    np.testing.assert_array_equal(got.log_probs, want.log_probs)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_a_step_launched_ahead_is_not_computed_again(
    runner: Counted, other: Counted, sampling: RowSampling
) -> None:
    step = (whole("a", sampling), whole("b"))
    first = runner.run(step, (ahead(0, "a", 6, sampling), ahead(1, "b")))
    same(first, other.run(step))
    ids = first.token_ids.tolist()
    step = (row("a", 6, ids[:1], sampling), row("b", 6, ids[1:]))
    runner.num_computed = 0
    second = runner.run(step, (ahead(1, "b", 7), ahead(0, "a", 7, sampling)))  # in another order
    same(second, other.run(step))
    ids = second.token_ids.tolist()
    step = (row("a", 7, ids[:1], sampling), row("b", 7, ids[1:]))
    same(runner.run(step), other.run(step))
    assert runner.num_computed == 0


def test_a_row_that_left_costs_only_itself(runner: Counted, other: Counted) -> None:
    step = (whole("a"), whole("b"), whole("c"))
    first = runner.run(step, (ahead(0, "a"), ahead(1, "b"), ahead(2, "c")))
    same(first, other.run(step))
    runner.num_computed = 0
    step = (row("c", 6, [first.token_ids[2]]), row("a", 6, [first.token_ids[0]]))
    same(runner.run(step), other.run(step))
    assert runner.num_computed == 0


def test_a_prompt_joins_the_rows_under_way(runner: Counted, other: Counted) -> None:
    first = runner.run((whole("a"),), (ahead(0, "a"),))
    same(first, other.run((whole("a"),)))
    runner.num_computed = 0
    step = (row("a", 6, [first.token_ids[0]]), whole("b", DRAWN), whole("c", None))
    second = runner.run(step, (ahead(1, "b"), ahead(0, "a", 7)))
    same(second, other.run(step))
    assert runner.num_computed == 2  # the prompts
    ids = second.token_ids
    step = (row("a", 7, [ids[0]]), row("b", 6, [ids[1]]), row("c", 5, [PROMPTS["c"][5]]))
    same(runner.run(step), other.run(step))
    assert runner.num_computed == 5  # c was not among those launched: all three


@pytest.mark.parametrize("change", ["token", "place", "request"])
def test_what_was_launched_for_something_else_is_computed_anew(
    runner: Counted, other: Counted, change: str
) -> None:
    first = runner.run((whole("a"), whole("b")), (ahead(0, "a"), ahead(1, "b")))
    token = int(first.token_ids[0])
    step = (
        row("a", 6, [token + (change == "token")])
        if change != "place"
        else row("a", 5, [PROMPTS["a"][5]]),
        row("c", 5, [7]) if change == "request" else row("b", 6, [first.token_ids[1]]),
    )
    other.run((whole("a"), whole("b")))
    if change == "request":
        for each in (runner, other):
            each.forward([whole("c", None)])
    runner.num_computed = 0
    same(runner.run(step), other.run(step))
    assert runner.num_computed == 2


def test_a_row_that_draws_no_token_harms_no_row_launched_beside_it(
    runner: Counted, other: Counted
) -> None:
    chunks = [row(key, 0, PROMPTS[key][:-1].tolist(), None) for key in "ab"]
    for each in (runner, other):
        each.forward(chunks)
        next(iter(each._pools.values()))[TABLES["a"][0], 2] = float("inf")
    last = tuple(row(key, 5, [PROMPTS[key][5]]) for key in "ab")
    first = runner.run(last, (ahead(0, "a"), ahead(1, "b")))
    same(first, other.run(last))
    assert first.token_ids[0] == -1
    step = (row("b", 6, [first.token_ids[1]]),)
    runner.num_computed = 0
    same(runner.run(step), other.run(step))
    assert runner.num_computed == 0


def test_other_calls_between_two_steps_leave_a_step_under_way_as_it_is(
    runner: Counted, other: Counted
) -> None:
    first = runner.run((whole("a"),), (ahead(0, "a"),))
    other.run((whole("a"),))
    runner.score((dataclasses.replace(whole("b", None), next_token_id=5),))
    step = (row("a", 6, [first.token_ids[0]]),)
    same(runner.run(step), other.run(step))


def test_whole_answers_are_the_same_as_without(runner: Counted, other: Counted) -> None:
    class Waits(Counted):
        def run(self, rows, following=()):  # type: ignore[no-untyped-def]
            return super().run(rows)

    other.__class__ = Waits
    answers = [serve(each) for each in (runner, other)]
    assert answers[0] == answers[1]
    assert sum(map(len, answers[0].values())) > 100
    assert runner.num_computed < other.num_computed / 2


def serve(runner: CudaRunner) -> dict[str, list[int]]:
    """Requests that come, draw, are penalised, end and are cancelled; their tokens."""
    engine = StepEngine(runner, SchedulerConfig(max_batch_size=4, max_tokens_per_step=32))
    sampling = (
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.8, top_k=5, seed=4),
        SamplingParams(repetition_penalty=1.3),
    )
    tokens: dict[str, list[int]] = {str(i): [] for i in range(8)}
    rng, step = np.random.default_rng(1), 0
    while engine.has_requests or step < 40:
        if step % 5 == 0 and step < 40:
            key = str(step // 5)
            prompt = tuple(rng.integers(3, 4000, 3 + step).tolist())
            params = sampling[3] if key == "7" else sampling[step // 5 % 3]
            request = Request(RequestKey(key), prompt, 12 + step // 2, params)
            engine.submit(request, lambda out: tokens[out.request_key].extend(out.token_ids))
        if step == 17:
            engine.abort(RequestKey("2"))
        engine.step()
        step += 1
    return tokens
