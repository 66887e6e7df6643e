"""Groups whose inputs lie anywhere: GPTQ's act-order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.errors import CheckpointError


def input_order(where: str, groups: NDArray[Any], group_size: int) -> NDArray[np.int32] | None:
    """Return the order [K] that sorts the inputs by their group, or None if they are sorted.

    `groups` [K] holds the group of each input. Raises CheckpointError, beginning with `where`, if
    groups are not of `group_size` inputs each, the last one's rest apart.
    """
    expected = np.arange(groups.size) // group_size
    if np.array_equal(groups, expected):
        return None
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], expected):
        raise CheckpointError(
            f"{where}: {groups.size} inputs are not in groups of {group_size} each"
        )
    return order.astype(np.int32)
