from __future__ import annotations

import pytest
import torch

from deepseek_triton.kernels import int4_one_token
from deepseek_triton.kernels.experts import experts_reference
from deepseek_triton.kernels.int4_one_token import experts_int4_one, linear_int4_one
from tests.unit.kernels.int4_weights import int4_weights, relative_error

DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 1.5e-3)], ids=str
)
GROUPS = pytest.mark.parametrize("group_size", [32, 64, 128])
SYMMETRIC = pytest.mark.parametrize("symmetric", [True, False])


@DTYPES
@SYMMETRIC
@GROUPS
@pytest.mark.parametrize(("features", "width"), [(13, 328), (17, 64)])
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
@SYMMETRIC
@GROUPS
@pytest.mark.parametrize(("width", "hidden"), [(40, 136)])
def test_one_token_through_its_experts(
    width: int, hidden: int, group_size: int, symmetric: bool, dtype: torch.dtype, tolerance: float
) -> None:
    kind = {"group_size": group_size, "dtype": dtype, "symmetric": symmetric}
    gate_up, _ = int4_weights(5, 2 * hidden, width, **kind)  # type: ignore[arg-type]
    down, _ = int4_weights(5, width, hidden, **kind)  # type: ignore[arg-type]
    x, residual = torch.randn(1, width, dtype=dtype), torch.randn(1, width, dtype=dtype)
    ids = torch.tensor([[4, 1, 3]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 1.5, 1.0]])
    out = torch.full((1, width), float("nan"), dtype=dtype)
    experts_int4_one(x, ids, weights, gate_up, down, residual=residual, out=out)
    want = experts_reference(x, ids, weights, gate_up, down, residual=residual)
    assert relative_error(out, want) < 2 * tolerance


@SYMMETRIC
def test_rows_longer_than_what_fits_at_once(
    symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int4_one_token, "_most_chunks", lambda *_: 1)
    kind = {"group_size": 32, "dtype": torch.float16, "symmetric": symmetric}
    weight, values = int4_weights(5, 17 * 128 + 32, **kind)  # type: ignore[arg-type]
    x = torch.randn(1, 17 * 128 + 32).half()
    assert relative_error(linear_int4_one(x, weight), x.double() @ values.T) < 1.5e-3
