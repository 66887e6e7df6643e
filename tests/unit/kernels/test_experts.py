from __future__ import annotations

import pytest
import torch

from deepseek_triton.kernels.experts import (
    Matrices,
    append_shared_experts,
    combine,
    experts,
    experts_reference,
)
from deepseek_triton.kernels.routing import Routing, route
from tests.unit.kernels.int4_weights import int4_weights, relative_error

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1.5e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def matrices(count: int, size: int, width: int, dtype: torch.dtype) -> tuple[Matrices, Matrices]:
    gate_up = torch.randn(count, 2 * size, width) / width**0.5
    down = torch.randn(count, width, size) / size**0.5
    return gate_up.to(dtype), down.to(dtype)


def choices(tokens: int, count: int, chosen: int) -> torch.Tensor:
    return torch.stack([torch.randperm(count)[:chosen] for _ in range(tokens)]).int()


def by_hand(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """One token and one expert at a time, in float64."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for expert, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            both = gate_up[expert].double() @ x[t].double()
            hidden = torch.nn.functional.silu(both[0::2]) * both[1::2]
            y[t] += weight * (down[expert].double() @ hidden)
    return y


@DTYPES
@pytest.mark.parametrize("tokens", [1, 3, 40, 70])
def test_sum_of_the_chosen_experts(tokens: int, dtype: torch.dtype) -> None:
    x, ids, weights = (
        torch.randn(tokens, 40, dtype=dtype),
        choices(tokens, 6, 3),
        torch.rand(tokens, 3),
    )
    gate_up, down = matrices(6, 24, 40, dtype)
    residual = torch.randn(tokens, 40, dtype=dtype)
    out = torch.full_like(x, float("nan"))
    experts(x, ids, weights, gate_up, down, residual=residual, out=out)
    want = by_hand(x, ids, weights, gate_up, down) + residual.double()
    assert relative_error(out, want) < TOLERANCE[dtype]
    reference = experts_reference(x, ids, weights, gate_up, down, residual=residual)
    assert relative_error(reference, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [1, 17, 20, 64, 70])
def test_all_tokens_to_the_same_experts_while_others_stay_empty(tokens: int) -> None:
    x, weights = torch.randn(tokens, 32), torch.rand(tokens, 2)
    ids = torch.tensor([[4, 1]]).repeat(tokens, 1).int()
    gate_up, down = matrices(9, 16, 32, torch.float32)
    want = by_hand(x, ids, weights, gate_up, down)
    assert relative_error(experts(x, ids, weights, gate_up, down), want) < 1e-6


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "group_size", "symmetric"),
    [(1, 64, True), (3, 32, False), (40, 128, True), (70, 64, False)],
)
def test_int4_experts(tokens: int, group_size: int, symmetric: bool, dtype: torch.dtype) -> None:
    options = {"group_size": group_size, "dtype": dtype, "symmetric": symmetric}
    gate_up, gate_up_values = int4_weights(5, 2 * 48, 64, **options)
    down, down_values = int4_weights(5, 64, 48, **options)
    x, ids, weights = (
        torch.randn(tokens, 64, dtype=dtype),
        choices(tokens, 5, 2),
        torch.rand(tokens, 2),
    )
    got = experts(x, ids, weights, gate_up, down)
    want = by_hand(x, ids, weights, gate_up_values, down_values)
    assert relative_error(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize(("tokens", "size", "width"), [(5, 20, 56), (20, 20, 56), (130, 40, 200)])
def test_int4_matrices_that_no_tile_divides(tokens: int, size: int, width: int) -> None:
    options = {"group_size": 32, "dtype": torch.float16, "symmetric": False}
    gate_up, gate_up_values = int4_weights(3, 2 * size, width, **options)  # type: ignore[arg-type]
    down, down_values = int4_weights(3, width, size, **options)  # type: ignore[arg-type]
    x, ids, weights = (
        torch.randn(tokens, width).half(),
        choices(tokens, 3, 2),
        torch.rand(tokens, 2),
    )
    out = torch.full_like(x, float("nan"))
    experts(x, ids, weights, gate_up, down, out=out)
    want = by_hand(x, ids, weights, gate_up_values, down_values)
    assert relative_error(out, want) < 1.5e-3


@pytest.mark.parametrize("size", [24, 40])
def test_weights_fetched_by_descriptors(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepseek_triton.kernels.experts.USE_DESCRIPTORS", True)
    x, ids, weights = torch.randn(70, 48).half(), choices(70, 5, 2), torch.rand(70, 2)
    gate_up, down = matrices(5, size, 48, torch.float16)
    want = by_hand(x, ids, weights, gate_up, down)
    assert relative_error(experts(x, ids, weights, gate_up, down), want) < 1.5e-3


def test_residual_is_updated_in_place() -> None:
    for tokens in (1, 5):
        x, ids, weights = torch.randn(tokens, 32), choices(tokens, 4, 2), torch.rand(tokens, 2)
        gate_up, down = matrices(4, 16, 32, torch.float32)
        stream = torch.randn(tokens, 32)
        want = stream.double() + by_hand(x, ids, weights, gate_up, down)
        experts(x, ids, weights, gate_up, down, residual=stream, out=stream)
        assert relative_error(stream, want) < 1e-6


def test_shared_experts_are_experts_that_all_tokens_choose() -> None:
    gate_up, down = matrices(3, 16, 32, torch.float32)
    shared_gate_up, shared_down = torch.randn(2 * 2 * 16, 32), torch.randn(32, 2 * 16)
    all_gate_up, all_down = append_shared_experts(gate_up, down, shared_gate_up, shared_down)
    x = torch.randn(4, 32)
    ids = torch.tensor([[3, 4]]).repeat(4, 1).int()
    gate, up = (x @ shared_gate_up.T).chunk(2, -1)
    want = (torch.nn.functional.silu(gate) * up) @ shared_down.T
    got = experts(x, ids, torch.ones(4, 2), all_gate_up, all_down)
    assert relative_error(got, want) < 1e-5


def test_combine_adds_a_token_s_rows_to_its_residual() -> None:
    partial, residual = torch.randn(6, 20), torch.randn(2, 20)
    out = torch.full((2, 20), float("nan"))
    combine(partial, residual, out)
    torch.testing.assert_close(out, residual + partial.view(2, 3, 20).sum(1))


@pytest.mark.parametrize("tokens", [5, 70])
def test_a_token_that_is_not_finite_harms_no_other(tokens: int) -> None:
    gate_up, down = matrices(7, 16, 32, torch.float32)
    x, logits = torch.randn(tokens, 32), torch.randn(tokens, 6)
    routing = Routing("softmax", 6, 2, num_shared=1)
    want = experts(x, *route(logits, routing), gate_up, down)
    x[3], logits[3] = float("nan"), float("nan")
    got = experts(x, *route(logits, routing), gate_up, down)
    others = torch.arange(tokens) != 3
    torch.testing.assert_close(got[others], want[others], rtol=1e-5, atol=1e-5)
    assert bool(got[3].isnan().all())
