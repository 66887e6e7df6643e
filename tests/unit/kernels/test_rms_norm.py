from __future__ import annotations

import pytest
import torch

from deepseek_triton.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm
from tests.unit.kernels.paged_cache import randn, relative_error


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 100), (2, 2048)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norm_equals_pytorchs(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, width, dtype=dtype), randn(width, dtype=dtype)
    want = torch.nn.functional.rms_norm(x.double(), (width,), weight.double(), 1e-6)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    assert relative_error(rms_norm(x, weight, 1e-6), want) < tolerance


def test_rows_of_a_view_are_normed_into_a_given_output() -> None:
    merged = randn(4, 96)
    x, weight = merged[:, :40], randn(40)
    out = torch.full((4, 40), torch.nan)
    got = rms_norm(x, weight, 1e-5, out=out)
    assert got is out
    assert relative_error(out, torch.nn.functional.rms_norm(x, (40,), weight, 1e-5)) < 1e-6


def test_the_residual_is_added_before_the_norm_and_returned() -> None:
    x, residual, weight = (randn(*shape) for shape in ((3, 50), (3, 50), (50,)))
    y, total = add_rms_norm(x, residual, weight, 1e-6)
    want = torch.nn.functional.rms_norm(x + residual, (50,), weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert relative_error(y, want) < 1e-6
    assert relative_error(add_rms_norm_reference(x, residual, weight, 1e-6)[0], want) < 1e-6


def test_no_rows_are_no_work() -> None:
    assert rms_norm(randn(0, 8), randn(8), 1e-6).shape == (0, 8)
