"""Frozen dataclasses to JSON and back, refusing unknown keys, missing keys and wrong types."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class StrictJsonError(ValueError):
    """A value that does not fit the dataclass; the message starts with its dotted key."""


def to_plain(value: Any) -> Any:
    """Return `value` with dataclasses as dicts and tuples as lists, ready for json.dumps."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def from_plain(cls: type[T], data: Any, key: str = "") -> T:
    """Build the dataclass `cls` from what json.loads returned; every field must be present.

    Raises:
        StrictJsonError: an unknown or missing key, or a value of the wrong type.
    """
    if not isinstance(data, dict):
        raise StrictJsonError(f"{key or 'top level'}: expected an object, found {data!r}")
    hints = get_type_hints(cls)
    names = _names(cls)
    for problem, keys in (("unknown", set(data) - names), ("missing", names - set(data))):
        if keys:
            raise StrictJsonError(f"{_join(key, min(keys))}: {problem} key")
    return cls(**{name: _convert(hints[name], data[name], _join(key, name)) for name in names})


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _member(union: list[Any], data: Any) -> Any:
    """Return the member of a union of dataclasses that has the keys of `data`, else the first."""
    keys = set(data) if isinstance(data, dict) else set()
    exact = (hint for hint in union if dataclasses.is_dataclass(hint) and _names(hint) == keys)
    return next(exact, union[0])


def _names(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def _convert(hint: Any, data: Any, key: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        inner = [arg for arg in args if arg is not type(None)]
        if data is None and len(inner) < len(args):
            return None
        return _convert(_member(inner, data), data, key)
    if dataclasses.is_dataclass(hint):
        return from_plain(hint, data, key)  # type: ignore[arg-type]
    if origin is tuple and isinstance(data, list):  # always tuple[X, ...] in our specs
        return tuple(_convert(args[0], item, f"{key}[{i}]") for i, item in enumerate(data))
    if origin is dict and isinstance(data, dict):
        return {name: _convert(args[1], item, _join(key, name)) for name, item in data.items()}
    if origin is Literal and data in args:
        return data
    if hint is float and type(data) is int:
        return float(data)
    if isinstance(hint, type) and type(data) is hint:
        return data
    raise StrictJsonError(f"{key}: {data!r} is not {getattr(hint, '__name__', hint)}")
