"""Drafts against what was drawn: which hold, and what the draft model reads next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.request import TopLogProbs
from deepseek_triton.runner.base import StepRow


def accept(
    rows: Sequence[StepRow], token_ids: list[int], log_probs: list[float]
) -> Iterator[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Yield each row's tokens and log probs up to the first that is not what the draft said.

    `token_ids` and `log_probs` hold 1 + d values for each sampling row with d drafts.
    """
    begin = 0
    for row in rows:
        if row.sampling is None:
            yield (), ()
            continue
        drafts = row.draft_token_ids
        right = 0
        while right < len(drafts) and token_ids[begin + right] == drafts[right]:
            right += 1
        kept = slice(begin, begin + right + 1)
        yield tuple(token_ids[kept]), tuple(log_probs[kept])
        begin += 1 + len(drafts)


def by_row(rows: Sequence[StepRow], tops: tuple[TopLogProbs, ...]) -> tuple[TopLogProbs, ...]:
    """Return those of each row's first place; `tops` has them of all places."""
    if not tops:
        return ()
    places = iter(tops)
    found = []
    for row in rows:
        own = [
            next(places) for _ in range(0 if row.sampling is None else 1 + len(row.draft_token_ids))
        ]
        found.append(own[0] if own else ())
    return tuple(found)


def following(row: StepRow, drawn: tuple[int, ...]) -> NDArray[np.int32] | None:
    """Return the token after each of the row's tokens and of its right drafts: [n].

    `drawn` is what `accept` yields. None: a token could not be drawn, or is not known.
    """
    last = drawn if row.sampling is not None else (row.next_token_id,)
    if last[-1] < 0:
        return None
    ids: NDArray[np.int32] = np.concatenate([row.token_ids[1:], np.array(last, np.int32)])
    return ids
