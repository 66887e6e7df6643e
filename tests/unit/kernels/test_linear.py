from __future__ import annotations

import pytest
import torch

from deepseek_triton.kernels.linear import linear, linear_reference
from deepseek_triton.kernels.swiglu import swiglu, swiglu_reference
from tests.unit.kernels.int4_weights import relative_error

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}
OWN = pytest.mark.parametrize("own", [True, False])


@pytest.fixture
def prefer(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """Several rows take our kernel, or PyTorch's."""
    monkeypatch.setattr("deepseek_triton.kernels.linear.MANY_FEATURES", 0 if own else 10**9)


DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


@DTYPES
@pytest.mark.parametrize(
    ("rows", "features", "width"),
    [(1, 37, 70), (1, 9, 2500), (5, 37, 70), (33, 16, 300), (66, 20, 40)],
)
def test_everything_fused_equals_the_layers_one_by_one(
    rows: int, features: int, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    x, norm = torch.randn(rows, width, dtype=dtype), torch.randn(width, dtype=dtype)
    weight = (torch.randn(2 * features, width) / width**0.5).to(dtype)
    bias, residual = (
        torch.randn(2 * features, dtype=dtype),
        torch.randn(rows, features, dtype=dtype),
    )
    got = linear(x, weight, bias, norm_weight=norm, eps=1e-3, residual=residual, swiglu=True)
    normed = torch.nn.functional.rms_norm(x.double(), (width,), norm.double(), 1e-3)
    gate, up = (normed @ weight.double().T + bias.double()).chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up + residual.double()
    assert relative_error(got, want) < TOLERANCE[dtype]


@DTYPES
@OWN
@pytest.mark.usefixtures("prefer")
@pytest.mark.parametrize("rows", [1, 2, 64, 65])
def test_plain_product_writes_every_element(rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 48, dtype=dtype), torch.randn(19, 48, dtype=dtype)
    out = torch.full((rows, 19), float("nan"), dtype=dtype)
    assert linear(x, weight, out=out) is out
    assert relative_error(out, x.double() @ weight.double().T) < TOLERANCE[dtype]


@OWN
@pytest.mark.usefixtures("prefer")
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_bias_and_residual_in_place(rows: int) -> None:
    x, weight, bias, stream = (torch.randn(*s) for s in ((rows, 32), (24, 32), (24,), (rows, 24)))
    want = stream + x @ weight.T + bias
    linear(x, weight, bias, residual=stream, out=stream)
    torch.testing.assert_close(stream, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_residual_is_updated_in_place(rows: int) -> None:
    x, weight, stream = torch.randn(rows, 32), torch.randn(24, 32), torch.randn(rows, 24)
    want = stream + x @ weight.T
    linear(x, weight, residual=stream, out=stream)
    torch.testing.assert_close(stream, want, rtol=1e-4, atol=1e-5)


@OWN
@pytest.mark.usefixtures("prefer")
@pytest.mark.parametrize("rows", [1, 4])
def test_a_row_of_a_wider_tensor_is_read_and_written_by_its_stride(rows: int) -> None:
    x, weight = torch.randn(rows, 100)[:, :32], torch.randn(24, 32)
    wide = torch.zeros(rows, 50)
    linear(x, weight, out=wide[:, :24])
    torch.testing.assert_close(wide[:, :24], x @ weight.T, rtol=1e-4, atol=1e-5)
    assert not wide[:, 24:].any()


@pytest.mark.parametrize("own", [True])
@pytest.mark.usefixtures("prefer")
def test_a_row_s_result_does_not_depend_on_its_company() -> None:
    x, weight = torch.randn(8, 40), torch.randn(16, 40)
    together = linear(x, weight)
    assert torch.equal(linear(x[2:5], weight), together[2:5])


def test_the_reference_is_the_textbook_layer() -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(6, 8), torch.randn(6)
    want = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(linear_reference(x, weight, bias), want, rtol=1e-4, atol=1e-5)


@DTYPES
def test_swiglu_of_odd_sizes(dtype: torch.dtype) -> None:
    both = torch.randn(3, 2 * 1030, dtype=dtype) * 4
    gate, up = both[:, :1030].double(), both[:, 1030:].double()
    want = gate / (1 + torch.exp(-gate)) * up
    assert relative_error(swiglu(both), want) < TOLERANCE[dtype]
    assert relative_error(swiglu_reference(both), want) < TOLERANCE[dtype]
