from __future__ import annotations

import pytest
import torch

from deepseek_triton.kernels.rotary import rotary, rotary_reference
from tests.unit.kernels.paged_cache import angles, randn, relative_error


@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 5, 8), (2, 40, 64)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_equals_complex_multiplication(
    shape: tuple[int, int, int], interleaved: bool
) -> None:
    x = randn(*shape)
    cos, sin = angles(shape[0], shape[2], interleaved)
    half = shape[2] // 2
    if interleaved:
        pairs, turn = x.unflatten(-1, (half, 2)), (cos[:, 0::2], sin[:, 0::2])
    else:
        pairs, turn = x.unflatten(-1, (2, half)).transpose(-1, -2), (cos[:, :half], sin[:, :half])
    turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(*turn)[:, None]
    flat = torch.view_as_real(turned)
    want = flat.flatten(-2) if interleaved else flat.transpose(-1, -2).flatten(-2)
    assert relative_error(rotary(x, cos, sin, interleaved=interleaved), want) < 1e-6
    assert relative_error(rotary_reference(x, cos, sin, interleaved=interleaved), want) < 1e-6


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_view_is_turned_in_place_and_its_surroundings_stay(interleaved: bool) -> None:
    heads = randn(3, 4, 24)
    before = heads.clone()
    view = heads[..., 8:]
    cos, sin = angles(3, 16, interleaved)
    rotary(view, cos, sin, interleaved=interleaved, out=view)
    want = rotary_reference(before[..., 8:], cos, sin, interleaved=interleaved)
    assert relative_error(view, want) < 1e-6
    assert torch.equal(heads[..., :8], before[..., :8])


def test_half_precision_is_rounded_once() -> None:
    x = randn(5, 3, 16, dtype=torch.float16)
    cos, sin = angles(5, 16, False)
    got = rotary(x, cos, sin, interleaved=False)
    assert got.dtype == torch.float16
    assert relative_error(got, rotary_reference(x.double(), cos, sin, interleaved=False)) < 5e-4
