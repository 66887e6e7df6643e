"""Reasoning between <think> and </think>, apart from the answer that follows it."""

from __future__ import annotations

from enum import Enum

from deepseek_triton.text.tags import TagScanner

OPEN, CLOSE = "<think>", "</think>"


class _State(Enum):
    BEFORE = "before"  # nothing but white space yet: it may begin with OPEN
    INSIDE = "inside"
    AFTER = "after"


def begins_inside(prompt: str) -> bool:
    """Whether a prompt ends within reasoning: R1's template puts <think> before the answer."""
    return prompt.rstrip().endswith(OPEN)


class ReasoningSplitter:
    """Splits one answer as it comes into reasoning and content; neither contains the tags.

    Reasoning is what stands between the prompt's or the answer's own <think> at its very beginning
    and the first </think>, or the answer's end. Line feeds around the tags belong to neither. How
    the text is split over `push` calls makes no difference to what is said in all.
    """

    def __init__(self, *, inside: bool) -> None:
        """`inside`: the prompt ends within reasoning."""
        self._state = _State.INSIDE if inside else _State.BEFORE
        self._scanner = TagScanner([CLOSE])
        self._held = ""  # BEFORE: the answer so far; INSIDE: line feeds that may precede CLOSE
        self._at_edge = True  # nothing of this part but line feeds yet

    def push(self, text: str) -> tuple[str, str]:
        """Return (reasoning, content) that `text` adds."""
        if self._state is _State.AFTER:
            return "", self._content(text)
        if self._state is _State.BEFORE:
            self._held += text
            start = self._held.lstrip()
            if OPEN.startswith(start) and start != OPEN:
                return "", ""
            text, self._held = self._held, ""
            if not start.startswith(OPEN):
                self._state, self._at_edge = _State.AFTER, False
                return "", text
            self._state, text = _State.INSIDE, start[len(OPEN) :]
        reasoning, content = "", ""
        for piece, is_tag in self._scanner.push(text):
            if self._state is _State.AFTER:
                content += self._content(piece)
            elif is_tag:
                self._state, self._at_edge, self._held = _State.AFTER, True, ""
            else:
                reasoning += self._reasoning(piece)
        return reasoning, content

    def flush(self) -> tuple[str, str]:
        """Return what was held back, now that the answer has ended."""
        if self._state is _State.BEFORE:
            held, self._held = self._held, ""
            return "", held
        rest = self._scanner.flush()
        return (self._reasoning(rest), "") if self._state is _State.INSIDE else ("", rest)

    def _reasoning(self, piece: str) -> str:
        piece = self._held + piece
        if self._at_edge:
            piece = piece.lstrip("\n")
        kept = piece.rstrip("\n")
        self._held = piece[len(kept) :]
        self._at_edge = self._at_edge and not kept
        return kept

    def _content(self, piece: str) -> str:
        if self._at_edge:
            piece = piece.lstrip("\n")
            self._at_edge = not piece
        return piece
