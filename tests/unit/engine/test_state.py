import numpy as np

from deepseek_triton.engine.state import RequestState
from deepseek_triton.request import Request, RequestKey, SamplingParams
from deepseek_triton.scheduler import ScheduledRow


def state(prompt=(1, 2, 3), max_tokens=4, sampling=None, **request):
    request = Request(RequestKey("a"), prompt, max_tokens, sampling or SamplingParams(), **request)
    return RequestState(request, lambda output: None)


def row(context_len, num_tokens, samples=True):
    return ScheduledRow(
        RequestKey("a"), context_len, num_tokens, np.arange(4, dtype=np.int32), samples
    )


def uniforms(under_test, count):
    drawn = []
    for index in range(count):
        drawn.append(under_test.step_row(row(2 + index, 1)).sampling.uniform)
        under_test.append(9, -1.0, 1)
    return drawn


def test_a_row_holds_the_tokens_from_the_context_on():
    under_test = state()
    under_test.append(7, -1.0, 1)
    assert under_test.step_row(row(1, 3)).token_ids.tolist() == [2, 3, 7]
    assert under_test.step_row(row(1, 1, samples=False)).sampling is None


def test_the_same_seed_draws_the_same_numbers_and_another_seed_others():
    seeded = SamplingParams(temperature=1.0, seed=5)
    first = uniforms(state(max_tokens=9, sampling=seeded), 9)
    assert uniforms(state(max_tokens=9, sampling=seeded), 9) == first
    other = SamplingParams(temperature=1.0, seed=6)
    assert uniforms(state(max_tokens=9, sampling=other), 9) != first
    assert len(set(first)) == 9
    assert all(0 <= u < 1 for u in first)


def test_without_a_seed_every_request_draws_its_own():
    unseeded = SamplingParams(temperature=1.0)
    assert uniforms(state(sampling=unseeded), 4) != uniforms(state(sampling=unseeded), 4)


def test_the_largest_seed_of_the_wire_is_accepted():
    sampling = SamplingParams(temperature=1.0, seed=2**64 - 1)
    assert len(uniforms(state(sampling=sampling), 4)) == 4


def test_a_row_asked_for_twice_gets_the_same_number():
    under_test = state(sampling=SamplingParams(temperature=1.0))
    first = under_test.step_row(row(0, 3)).sampling.uniform
    assert under_test.step_row(row(0, 3)).sampling.uniform == first
    under_test.append(9, -1.0, 1)
    assert under_test.step_row(row(3, 1)).sampling.uniform != first


def test_end_ids_are_banned_until_min_tokens():
    under_test = state(sampling=SamplingParams(min_tokens=1), end_id=0, more_end_ids=(5,))
    before = under_test.step_row(row(0, 3)).sampling
    assert (before.banned_id, before.more_banned_ids) == (0, (5,))
    under_test.append(9, -1.0, 1)
    after = under_test.step_row(row(3, 1)).sampling
    assert (after.banned_id, after.more_banned_ids) == (None, ())


def test_any_of_several_end_ids_ends():
    under_test = state(end_id=0, more_end_ids=(5,))
    assert [under_test.ends_with(token) for token in (0, 5, 1)] == [True, True, False]
    assert not state().ends_with(0)


def test_penalties_see_prompt_and_output_apart():
    under_test = state(sampling=SamplingParams(repetition_penalty=2.0))
    under_test.append(7, -1.0, 1)
    sampling = under_test.step_row(row(3, 1)).sampling
    assert sampling.prompt_token_ids.tolist() == [1, 2, 3]
    assert sampling.output_token_ids.tolist() == [7]


def test_the_last_token_is_told():
    under_test = state(max_tokens=2)
    assert [under_test.append(7, -1.0, 1), under_test.append(8, -1.0, 2)] == [False, True]
    assert (under_test.first_token_time_ns, under_test.last_token_time_ns) == (1, 2)
