from __future__ import annotations

import pytest
import torch

from deepseek_triton.kernels.append_kv import append_grouped_query, append_latent
from deepseek_triton.kernels.rotary import rotary_reference
from tests.unit.kernels.paged_cache import angles, randn, relative_error

SLOTS = torch.tensor([17, -1, 3, 64], dtype=torch.int32)


def poisoned_pool(width: int) -> torch.Tensor:
    return torch.full((5, 16, width), torch.nan)


def written(pool: torch.Tensor) -> list[int]:
    return sorted(torch.unique((~pool.view(-1, pool.shape[-1]).isnan()).nonzero()[:, 0]).tolist())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rank", "rope"), [(16, 8), (40, 12)])
def test_a_latent_row_is_normed_turned_and_written_at_its_slot(
    rank: int, rope: int, interleaved: bool
) -> None:
    kv_a, norm = randn(4, 7 + rank + rope)[:, 7:], randn(rank)
    cos, sin = angles(4, rope, interleaved)
    pool = poisoned_pool(rank + rope)
    rows = append_latent(kv_a, norm, 1e-6, cos, sin, pool, SLOTS, interleaved=interleaved)
    latent = torch.nn.functional.rms_norm(kv_a[:, :rank], (rank,), norm, 1e-6)
    turned = rotary_reference(kv_a[:, None, rank:], cos, sin, interleaved=interleaved)[:, 0]
    assert relative_error(rows, torch.cat((latent, turned), dim=1)) < 1e-6
    assert torch.equal(pool.view(-1, rank + rope)[[17, 3, 64]], rows[[0, 2, 3]])
    assert written(pool) == [3, 17, 64]


@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 4, 16), (7, 1, 12), (40, 8, 128)])
def test_grouped_query_rows_are_turned_and_written(heads: int, groups: int, dim: int) -> None:
    merged = randn(4, heads + 2 * groups, dim)
    q, k, v = merged.split((heads, groups, groups), dim=1)
    cos, sin = angles(4, dim, False)
    k_pool, v_pool = poisoned_pool(groups * dim), poisoned_pool(groups * dim)
    q_turned, k_turned = append_grouped_query(
        q, k, v, cos, sin, k_pool, v_pool, SLOTS, interleaved=False
    )
    assert relative_error(q_turned, rotary_reference(q, cos, sin, interleaved=False)) < 1e-6
    assert relative_error(k_turned, rotary_reference(k, cos, sin, interleaved=False)) < 1e-6
    flat_k, flat_v = k_pool.view(-1, groups * dim), v_pool.view(-1, groups * dim)
    assert torch.equal(flat_k[[17, 3, 64]], k_turned.flatten(1)[[0, 2, 3]])
    assert torch.equal(flat_v[[17, 3, 64]], v.flatten(1)[[0, 2, 3]])
    assert written(k_pool) == written(v_pool) == [3, 17, 64]
