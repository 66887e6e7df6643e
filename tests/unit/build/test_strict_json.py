from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from deepseek_triton.build.strict_json import StrictJsonError, from_plain, to_plain


@dataclass(frozen=True)
class Inner:
    kind: Literal["a", "b"]
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Outer:
    name: str
    ratio: float
    inner: Inner | None
    many: tuple[Inner, ...]
    versions: dict[str, str]


VALUE = Outer("x", 0.5, Inner("a", (1, 2)), (Inner("b", ()),), {"onnx": "1"})


def plain(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(to_plain(VALUE)))
    data.update(changes)
    return data


@dataclass(frozen=True)
class Circle:
    radius: float


@dataclass(frozen=True)
class Square:
    side: float


@dataclass(frozen=True)
class Drawing:
    shape: Circle | Square | None


@pytest.mark.parametrize("shape", [Circle(1.0), Square(2.0), None])
def test_the_keys_tell_which_member_of_a_union_it_is(shape: Circle | Square | None) -> None:
    assert from_plain(Drawing, to_plain(Drawing(shape))) == Drawing(shape)
    with pytest.raises(StrictJsonError, match="shape.edge: unknown key"):
        from_plain(Drawing, {"shape": {"edge": 1.0}})


def test_a_value_survives_the_round_trip() -> None:
    assert from_plain(Outer, plain()) == VALUE
    assert from_plain(Outer, plain(inner=None)).inner is None


def test_a_whole_number_is_read_as_a_float_field() -> None:
    ratio = from_plain(Outer, plain(ratio=2)).ratio
    assert ratio == 2.0 and isinstance(ratio, float)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"name": 3}, "name"),
        ({"ratio": "0.5"}, "ratio"),
        ({"ratio": True}, "ratio"),
        ({"inner": {"kind": "c", "ids": []}}, "inner.kind"),
        ({"inner": {"kind": "a", "ids": [1, True]}}, "inner.ids[1]"),
        ({"inner": {"kind": "a", "ids": 1}}, "inner.ids"),
        ({"inner": {"kind": "a"}}, "inner.ids: missing"),
        ({"many": [{"kind": "a", "ids": [], "more": 1}]}, "many[0].more: unknown"),
        ({"versions": {"onnx": 1}}, "versions.onnx"),
        ({"many": None}, "many"),
        ({"surprise": 1}, "surprise: unknown"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(StrictJsonError) as caught:
        from_plain(Outer, plain(**changes))
    assert str(caught.value).startswith(key)


def test_a_list_at_the_top_is_refused() -> None:
    with pytest.raises(StrictJsonError, match="expected an object"):
        from_plain(Outer, [])
