from __future__ import annotations

import pytest
import torch

from deepseek_triton.kernels.router import choose_experts, choose_experts_reference
from deepseek_triton.kernels.routing import Routing, route, route_reference

ROUTINGS = {
    "v2_lite": Routing("softmax", 64, 6, num_shared=2),
    "v2": Routing("softmax", 160, 6, 16.0, num_groups=8, top_groups=3),
    "v3": Routing("sigmoid", 256, 8, 2.5, True, num_groups=8, top_groups=4, num_shared=1),
    "one_group": Routing("sigmoid", 6, 2, 1.0, True),
    "not_normalised": Routing("sigmoid", 12, 4, 1.5, False, num_groups=4, top_groups=2),
    "odd": Routing("softmax", 5, 3),
}


def bias_of(routing: Routing) -> torch.Tensor | None:
    return torch.randn(routing.num_experts) * 0.1 if routing.kind == "sigmoid" else None


@pytest.mark.parametrize("name", ROUTINGS)
def test_choice_and_weights(name: str) -> None:
    routing = ROUTINGS[name]
    logits, bias = torch.randn(5, routing.num_experts), bias_of(routing)
    ids, weights = route(logits, routing, bias)
    want_ids, want_weights = route_reference(logits, routing, bias)
    assert ids.dtype == torch.int32
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ROUTINGS)
def test_equal_scores_go_to_the_lower_expert(name: str) -> None:
    routing = ROUTINGS[name]
    logits = torch.randn(4, routing.num_experts).round()
    logits[0] = 0.0
    bias = None if routing.kind == "softmax" else torch.zeros(routing.num_experts)
    ids, _ = route(logits, routing, bias)
    assert torch.equal(ids, route_reference(logits, routing, bias)[0])
    assert ids[0, : routing.top_k].tolist() == list(range(routing.top_k))


def test_softmax_weights_are_the_probabilities_and_shared_experts_count_whole() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    ids, weights = route(logits, Routing("softmax", 4, 2, 3.0, num_shared=1))
    probabilities = logits.softmax(-1)[0]
    assert ids.tolist() == [[1, 2, 4]]
    assert weights[0].tolist() == pytest.approx(
        [3 * float(probabilities[1]), 3 * float(probabilities[2]), 1.0], rel=1e-5
    )


def test_ids_stay_in_range_when_logits_are_nan() -> None:
    ids, _ = route(torch.full((2, 6), float("nan")), Routing("softmax", 6, 2))
    assert bool(((ids >= 0) & (ids < 6)).all())


@pytest.mark.parametrize("tokens", [1, 3, 18])
@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_from_the_hidden_state(name: str, tokens: int) -> None:
    routing = ROUTINGS[name]
    width = 2100 if name == "one_group" else 300  # more and less than a program's step
    x, norm = torch.randn(tokens, width), torch.rand(width) + 0.5
    weight, bias = torch.randn(routing.num_experts, width), bias_of(routing)
    for _ in range(2 if tokens == 3 else 1):  # the counters are as they were
        got = choose_experts(x, weight, norm, 1e-5, routing, bias)
        want = choose_experts_reference(x, weight, norm, 1e-5, routing, bias)
        torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(got[1], want[1])
        torch.testing.assert_close(got[2], want[2], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_the_router_sees_the_rounded_norm(tokens: int) -> None:
    routing = Routing("sigmoid", 9, 9)  # all experts: weights are the scores
    x, norm = torch.randn(tokens, 300).half(), torch.randn(300).half()
    weight = torch.randn(9, 300) / 300**0.5
    normed, ids, weights = choose_experts(x, weight, norm, 1e-5, routing)
    want = torch.nn.functional.rms_norm(x.double(), (300,), norm.double(), 1e-5)
    torch.testing.assert_close(normed.double(), want, rtol=2e-3, atol=2e-3)
    scores = (normed.double() @ weight.double().T).sigmoid().gather(1, ids.long())
    torch.testing.assert_close(weights.double(), scores, rtol=1e-4, atol=1e-5)
