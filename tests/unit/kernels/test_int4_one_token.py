from __future__ import annotations

import pytest
import torch

from deepseek_triton.kernels.experts import experts_reference
from deepseek_triton.kernels.int4_one_token import experts_int4_one, linear_int4_one
from tests.unit.kernels.int4_weights import int4_weights, relative_error

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1.5e-3}
KINDS = pytest.mark.parametrize(
    ("group_size", "symmetric", "dtype"),
    [
        (32, True, torch.float16),
        (32, False, torch.float32),
        (64, True, torch.float32),
        (64, False, torch.float16),
        (128, True, torch.float16),
        (128, True, torch.float32),
        (128, False, torch.float32),
    ],
    ids=str,
)


@KINDS
@pytest.mark.parametrize(("features", "width"), [(13, 328), (8, 64)])
def test_a_row_times_the_dequantised_weights(
    features: int, width: int, group_size: int, symmetric: bool, dtype: torch.dtype
) -> None:
    weight, values = int4_weights(
        features, width, group_size=group_size, dtype=dtype, symmetric=symmetric
    )
    x, residual = torch.randn(1, width, dtype=dtype), torch.randn(1, features, dtype=dtype)
    bias = torch.randn(features, dtype=dtype)
    out = torch.full((1, features), float("nan"), dtype=dtype)
    want = x.double() @ values.T
    assert relative_error(linear_int4_one(x, weight, out=out), want) < TOLERANCE[dtype]
    want += bias.double() + residual.double()
    got = linear_int4_one(x, weight, bias, residual=residual, out=residual)
    assert relative_error(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("width", [1152, 4352])
def test_a_row_of_many_blocks(width: int) -> None:
    weight, values = int4_weights(3, width, group_size=128, dtype=torch.float16, symmetric=True)
    x = torch.randn(1, width).half()
    want = x.double() @ values.T
    assert relative_error(linear_int4_one(x, weight), want) < TOLERANCE[torch.float16]


@KINDS
@pytest.mark.parametrize("pairs", [1, 3])
def test_one_token_through_its_experts(
    pairs: int, group_size: int, symmetric: bool, dtype: torch.dtype
) -> None:
    width, hidden = 12, 40
    kind = {"group_size": group_size, "dtype": dtype, "symmetric": symmetric}
    gate_up, _ = int4_weights(5, 2 * hidden, width, **kind)  # type: ignore[arg-type]
    down, _ = int4_weights(5, width, hidden, **kind)  # type: ignore[arg-type]
    x, residual = torch.randn(1, width, dtype=dtype), torch.randn(1, width, dtype=dtype)
    ids = torch.tensor([[4, 1, 3][:pairs]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 1.5, 1.0][:pairs]])
    out = torch.full((1, width), float("nan"), dtype=dtype)
    experts_int4_one(x, ids, weights, gate_up, down, residual=residual, out=out)
    want = experts_reference(x, ids, weights, gate_up, down, residual=residual)
    assert relative_error(out, want) < 2 * TOLERANCE[dtype]
