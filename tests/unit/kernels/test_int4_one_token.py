from __future__ import annotations

import pytest
import torch

from deepseek_triton.kernels.experts import experts_reference
from deepseek_triton.kernels.int4_one_token import experts_int4_one, linear_int4_one
from tests.unit.kernels.int4_weights import int4_weights, relative_error

DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 2e-3)], ids=str
)


@DTYPES
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("features", "width", "group_size"),
    [(40, 64, 64), (13, 328, 128), (9, 2304, 64)],
)
def test_a_row_times_the_dequantised_weights(
    features: int,
    width: int,
    group_size: int,
    symmetric: bool,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    weight, values = int4_weights(
        features, width, group_size=group_size, dtype=dtype, symmetric=symmetric
    )
    x, residual = torch.randn(1, width, dtype=dtype), torch.randn(1, features, dtype=dtype)
    bias = torch.randn(features, dtype=dtype)
    out = torch.full((1, features), float("nan"), dtype=dtype)
    want = x.double() @ values.T
    assert relative_error(linear_int4_one(x, weight, out=out), want) < tolerance
    want += bias.double() + residual.double()
    got = linear_int4_one(x, weight, bias, residual=residual, out=residual)
    assert relative_error(got, want) < tolerance


@DTYPES
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("width", "hidden"), [(128, 64), (136, 40)])
def test_one_token_through_its_experts(
    width: int, hidden: int, symmetric: bool, dtype: torch.dtype, tolerance: float
) -> None:
    kind = {"group_size": 64, "dtype": dtype, "symmetric": symmetric}
    gate_up, _ = int4_weights(5, 2 * hidden, width, **kind)  # type: ignore[arg-type]
    down, _ = int4_weights(5, width, hidden, **kind)  # type: ignore[arg-type]
    x, residual = torch.randn(1, width, dtype=dtype), torch.randn(1, width, dtype=dtype)
    ids = torch.tensor([[4, 1, 3]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 1.5, 1.0]])
    out = torch.full((1, width), float("nan"), dtype=dtype)
    experts_int4_one(x, ids, weights, gate_up, down, residual=residual, out=out)
    want = experts_reference(x, ids, weights, gate_up, down, residual=residual)
    assert relative_error(out, want) < 2 * tolerance
