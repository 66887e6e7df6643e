from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.http_generate import server_sent_events


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_events_are_the_same_with_each_line_ending(end: str) -> None:
    lines = ['data: {"a": 1}', "", "data:no space", "data:  two spaces", "", ""]
    events = list(server_sent_events([end.join(lines).encode()]))
    assert events == ['{"a": 1}', "no space\n two spaces"]


@given(st.data())
def test_cuts_anywhere_change_nothing(data: st.DataObject) -> None:
    text = 'data: {"text": "é深🙂"}\r\n\r\n: note\r\ndata: a\rdata: b\r\rid: 7\n\ndata: c\n\n'
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))))
    bounds = [0, *cuts, len(raw)]
    pieces = [raw[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    assert list(server_sent_events(pieces)) == ['{"text": "é深🙂"}', "a\nb", "c"]


def test_an_event_without_its_blank_line_is_dropped() -> None:
    assert list(server_sent_events([b"data: whole\n\ndata: half\n"])) == ["whole"]


def test_other_fields_and_empty_events_give_nothing() -> None:
    assert list(server_sent_events([b"\n\nevent: x\nretry: 5\n\n:\n\n"])) == []
