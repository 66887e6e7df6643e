from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton.text.tags import TagScanner

TAGS = ("<a>", "</a>", "<|b|>")
TEXT = st.lists(st.sampled_from([*TAGS, "<", "</", "<|", "b", "|>", "a>", "x"]), max_size=12)


def scan(chunks: list[str]) -> list[tuple[str, bool]]:
    """All pieces, neighbours of text joined."""
    scanner = TagScanner(TAGS)
    pieces = [piece for chunk in chunks for piece in scanner.push(chunk)]
    pieces.append((scanner.flush(), False))
    joined: list[tuple[str, bool]] = []
    for text, is_tag in pieces:
        if joined and not is_tag and not joined[-1][1]:
            joined[-1] = (joined[-1][0] + text, False)
        elif text:
            joined.append((text, is_tag))
    return joined


@given(TEXT, st.integers(1, 4))
def test_what_is_found_does_not_depend_on_how_the_text_is_split(parts: list[str], n: int) -> None:
    text = "".join(parts)
    chunks = [text[i : i + n] for i in range(0, len(text), n)]
    assert scan(chunks) == scan([text])
    assert "".join(piece for piece, _ in scan(chunks)) == text
    assert all(piece in TAGS for piece, is_tag in scan(chunks) if is_tag)
    assert not any(tag in piece for piece, is_tag in scan(chunks) if not is_tag for tag in TAGS)


def test_only_what_may_become_a_tag_waits() -> None:
    scanner = TagScanner(TAGS)
    assert list(scanner.push("text <")) == [("text ", False)]
    assert list(scanner.push("x and </a")) == [("<x and ", False)]
    assert list(scanner.push(">")) == [("</a>", True)]
    assert scanner.flush() == ""
