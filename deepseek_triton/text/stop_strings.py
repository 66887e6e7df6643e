"""Stop strings, found in text rather than in tokens."""

from __future__ import annotations

from collections.abc import Iterable


class StopStringMatcher:
    """Passes one request's text through until a stop string completes.

    The stop string that completes first wins, and of those that complete at the same character the
    longest. So the outcome depends on the text alone, not on how it is split over `push` calls,
    and nothing waits for a longer match. Only the longest suffix that may still become a stop
    string is held back. An Aho-Corasick automaton (CACM 18(6), 1975) makes each character cost the
    same, however many and however long the stop strings are.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Build the automaton; empty strings are ignored."""
        # State 0 is the empty prefix; every state is a prefix of some stop string.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]  # longest stop string that is a suffix of the state
        self._fallback = [0]  # longest proper suffix of the state that is a state
        for stop in stops:
            if stop:
                self._add(stop)
        self._link()
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return (text that is safe to emit, the stop string that ended it or None).

        After a match every further call returns ("", the same stop string).
        """
        if self._matched is not None:
            return "", self._matched
        held = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            self._state = self._step(self._state, character)
            matched = self._match[self._state]
            if matched is not None:
                self._held, self._matched = "", matched
                return held[: end - len(matched)], matched
        safe = len(held) - self._depth[self._state]
        self._held = held[safe:]
        return held[:safe], None

    def flush(self) -> str:
        """Return the text held back, now that no more comes, and start afresh."""
        held, self._held, self._state, self._matched = self._held, "", 0, None
        return held

    def _step(self, state: int, character: str) -> int:
        while True:
            following = self._next[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fallback[state]

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].setdefault(character, len(self._next))
            if following == len(self._next):
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
                self._fallback.append(0)
            state = following
        self._match[state] = stop

    def _link(self) -> None:
        """Set the fallbacks breadth first, and let each state match what its fallback matches."""
        queue = list(self._next[0].values())
        for state in queue:
            for character, following in self._next[state].items():
                queue.append(following)
                self._fallback[following] = self._step(self._fallback[state], character)
            if self._match[state] is None:
                self._match[state] = self._match[self._fallback[state]]
