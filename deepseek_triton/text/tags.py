"""Tags in a stream of text, found however the text is split."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence


class TagScanner:
    """Splits one request's text into tags and what lies between them.

    Only a suffix that may still become a tag is held back. No tag may be a prefix of another.
    """

    def __init__(self, tags: Sequence[str]) -> None:
        self._tags = tuple(tags)
        self._pattern = re.compile("|".join(map(re.escape, tags)))
        self._first_characters = {tag[0] for tag in tags}
        self._longest = max(map(len, tags))
        self._held = ""

    def push(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield (piece, whether it is a tag) in order; pieces of text are never empty.

        The iterator must be exhausted before the next call.
        """
        text = self._held + text
        begin = 0
        for match in self._pattern.finditer(text):
            if match.start() > begin:
                yield text[begin : match.start()], False
            yield match.group(), True
            begin = match.end()
        end = self._safe_end(text, begin)
        self._held = text[end:]
        if end > begin:
            yield text[begin:end], False

    def flush(self) -> str:
        """Return the text held back, now that no more comes."""
        held, self._held = self._held, ""
        return held

    def _safe_end(self, text: str, begin: int) -> int:
        """Return where the longest suffix of `text` that begins a tag starts."""
        for start in range(max(begin, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_characters:
                rest = text[start:]
                if any(tag.startswith(rest) for tag in self._tags):
                    return start
        return len(text)
