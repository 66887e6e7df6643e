"""Output ids to text, piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from deepseek_triton.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Decodes one request's output ids as they come.

    However the ids are split over `push` calls, the joined pieces equal `tokenizer.decode` of them
    all. Each id costs the same, whatever came before: nothing is decoded twice.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        # Replaces each maximal invalid part by one U+FFFD, as the tokenizers library does.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these ids complete; bytes of an unfinished character wait."""
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def flush(self) -> str:
        """Return what waits, U+FFFD for an unfinished character, and start afresh."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
