from __future__ import annotations

import pytest
import torch

from deepseek_triton.kernels.int4_tensor import pack_int4
from deepseek_triton.kernels.linear_int4 import linear_int4, linear_int4_reference
from tests.unit.kernels.int4_weights import int4_weights, relative_error

GROUPS = pytest.mark.parametrize("group_size", [32, 64, 128])


@GROUPS
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dense_gives_the_weights_back(group_size: int, symmetric: bool, dtype: torch.dtype) -> None:
    weight, values = int4_weights(
        3, 5, 328, group_size=group_size, dtype=dtype, symmetric=symmetric
    )
    assert weight.shape == (3, 5, 328)
    assert torch.equal(weight.dense(), values.to(dtype))


@GROUPS
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("rows", "features", "width"), [(1, 40, 64), (20, 70, 328)])
def test_product_with_integers_scaled_once(
    rows: int, features: int, width: int, group_size: int, symmetric: bool
) -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 1e-3)):
        weight, values = int4_weights(
            features, width, group_size=group_size, dtype=dtype, symmetric=symmetric
        )
        x = torch.randn(rows, width, dtype=dtype)
        out = torch.full((rows, features), float("nan"), dtype=dtype)
        want = x.double() @ values.T
        assert relative_error(linear_int4(x, weight, out=out), want) < tolerance
        assert relative_error(linear_int4_reference(x, weight), want) < 2 * tolerance


def test_many_rows_take_large_tiles() -> None:
    weight, values = int4_weights(130, 256, group_size=128, dtype=torch.float16, symmetric=False)
    x = torch.randn(70, 256, dtype=torch.float16)
    assert relative_error(linear_int4(x, weight), x.double() @ values.T) < 1e-3


def test_bias_and_residual_in_place() -> None:
    weight, values = int4_weights(24, 64, group_size=32, dtype=torch.float32, symmetric=True)
    x, bias, stream = torch.randn(3, 64), torch.randn(24), torch.randn(3, 24)
    want = x.double() @ values.T + bias.double() + stream.double()
    linear_int4(x, weight, bias, residual=stream, out=stream)
    assert relative_error(stream, want) < 1e-6


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("width", [300, 2500])
def test_norm_before_the_product(rows: int, width: int) -> None:
    weight, values = int4_weights(24, width, group_size=64, dtype=torch.float16, symmetric=False)
    x, norm = torch.randn(rows, width).half(), torch.randn(width).half()
    got = linear_int4(x, weight, norm_weight=norm, eps=1e-3)
    want = torch.nn.functional.rms_norm(x.double(), (width,), norm.double(), 1e-3) @ values.T
    assert relative_error(got, want) < 1.5e-3


def test_zero_points_of_eight_count_as_none() -> None:
    packed, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 1)
    eight = torch.full((4, 1), 8, dtype=torch.uint8)
    assert pack_int4(packed, scales, eight, 128).zeros is None


@pytest.mark.parametrize(("group_size", "groups"), [(16, 8), (64, 1)])
def test_what_the_kernels_do_not_take_is_named(group_size: int, groups: int) -> None:
    packed, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, groups)
    with pytest.raises(ValueError, match="INT4"):
        pack_int4(packed, scales, None, group_size)
