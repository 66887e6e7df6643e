from __future__ import annotations

import pytest
import torch

from deepseek_triton.kernels.grouping import group_pairs


def sorted_blocks(ids: torch.Tensor, experts: int, rows: int) -> list[tuple[int, list[int]]]:
    """(expert, pairs) of each block, by hand."""
    flat = ids.flatten().tolist()
    blocks = []
    for expert in range(experts):
        mine = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        blocks += [(expert, mine[i : i + rows]) for i in range(0, len(mine), rows)]
    return blocks


@pytest.mark.parametrize(
    ("tokens", "chosen", "experts", "rows"),
    [
        (1, 6, 66, 16),
        (100, 6, 66, 16),
        (90, 2, 3, 32),
        (16, 1, 4, 16),
        (64, 8, 66, 16),
        (33, 3, 16, 8),
    ],
)
def test_pairs_are_sorted_by_expert_and_padded(
    tokens: int, chosen: int, experts: int, rows: int
) -> None:
    ids = torch.stack([torch.randperm(experts)[:chosen] for _ in range(tokens)]).int()
    check_groups(ids, experts, rows)


@pytest.mark.parametrize("tokens", [20, 70])
def test_all_tokens_to_the_same_experts(tokens: int) -> None:
    check_groups(torch.tensor([[2, 0]]).repeat(tokens, 1).int(), 5, 16)


def check_groups(ids: torch.Tensor, experts: int, rows: int) -> None:
    groups = group_pairs(ids, experts, rows)
    want = sorted_blocks(ids, experts, rows)
    assert len(want) <= groups.block_experts.numel()
    unused = groups.block_experts.numel() - len(want)
    assert groups.block_experts.tolist() == [expert for expert, _ in want] + [-1] * unused
    slots = [pairs + [-1] * (rows - len(pairs)) for _, pairs in want] + [[-1] * rows] * unused
    assert groups.pairs.view(-1, rows).tolist() == slots
