from __future__ import annotations

import pytest
import torch

from deepseek_triton.kernels.step_inputs import embedding, rotary_angles


@pytest.mark.parametrize(("vocab", "width"), [(7, 40), (3, 2300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_of_the_embedding(vocab: int, width: int, dtype: torch.dtype) -> None:
    table, ids = torch.randn(vocab, width, dtype=dtype), torch.tensor([2, 0, 2, 1]).int()
    assert torch.equal(embedding(table, ids), torch.nn.functional.embedding(ids, table))


@pytest.mark.parametrize("width", [64, 24])
def test_angles_of_near_and_far_positions(width: int) -> None:
    positions = torch.tensor([0, 1, 1000, 163_839, -1]).int()
    inv_freq = (10_000 ** (-torch.arange(0, width, 2) / width)).repeat(2).float()
    cos, sin = rotary_angles(positions, inv_freq, 1.25)
    angle = (positions[:, None].float() * inv_freq).double()  # the product rounds, as it does there
    torch.testing.assert_close(cos.double(), angle.cos() * 1.25, rtol=0, atol=1e-6)
    torch.testing.assert_close(sin.double(), angle.sin() * 1.25, rtol=0, atol=1e-6)
