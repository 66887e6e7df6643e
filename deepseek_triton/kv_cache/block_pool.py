"""Which KV blocks are taken, and by how many requests."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Block ids 0 … num_blocks − 1, each free or held by one or more holders.

    Not thread-safe: the thread that schedules owns it.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}: a pool needs at least one block")
        self._references = [0] * num_blocks
        # A stack: the block freed last is taken first, while its memory is still warm.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, free or not."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return len(self._references) - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` free blocks, each with one holder; None, and nothing taken, if too few."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        for block in taken:
            self._references[block] = 1
        return taken

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of `blocks`; raises ValueError for one that is free."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is free: nobody holds it")
            self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each of `blocks`; raises ValueError for one that is free already."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is free already")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[Iterable[int]] | None = None) -> None:
        """Raise AssertionError unless every block is either free or held, once per holder.

        With `tables`, the block ids of every holder, the holders of each block are counted as well.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a block is twice in the free list")
        for block, references in enumerate(self._references):
            if references < 0 or (references == 0) != (block in free):
                raise AssertionError(f"block {block}: {references} holders, free: {block in free}")
        if tables is not None:
            counts = [0] * self.num_blocks
            for table in tables:
                for block in table:
                    counts[block] += 1
            if counts != self._references:
                raise AssertionError(f"holders {self._references}, but block tables say {counts}")
