"""Typed reading of a JSON object: every complaint names the file and the key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepseek_triton.errors import CheckpointError

MAX_INTEGER = 1 << 24
"""No size of a model comes near; a slip of the pen beyond it would take all memory."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; raise CheckpointError if it is anything else."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # also invalid UTF-8
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {describe(value)}")
    return value


def describe(value: object) -> str:
    """Return `value` as JSON would show it, shortened, for a message."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """One JSON object whose values are read by type.

    A key that is absent takes the default; an explicit null counts as absent only for the
    `optional_*` readers. All readers raise CheckpointError.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def error(self, key: str, problem: str) -> CheckpointError:
        """Return the error that says `problem` about `key`; the caller raises it."""
        return CheckpointError(f"{self.where}: {key} {problem}")

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        """Return an integer in `minimum` ... `maximum`."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer, found {describe(value)}")
        if value < minimum:
            raise self.error(key, f"must be at least {minimum}, found {value}")
        if value > maximum:
            raise self.error(key, f"must be at most {maximum}, found {describe(value)}")
        return value

    def optional_integer(self, key: str, default: int | None, minimum: int = 1) -> int | None:
        """Return an integer in `minimum` ... MAX_INTEGER, or None for null."""
        if self.values.get(key, default) is None:
            return None
        return self.integer(key, default if default is not None else minimum, minimum)

    def required_integer(
        self, key: str, why: str, default: int | None = None, maximum: int = MAX_INTEGER
    ) -> int:
        """Return a positive integer; without a `default` the key must be there."""
        if default is None and not self.has(key):
            raise self.error(key, f"is missing: {why}")
        return self.integer(key, default or 1, maximum=maximum)

    def positive(self, key: str, default: float) -> float:
        """Return a finite number above zero as a float."""
        value = self._number(key, default)
        if value <= 0.0:
            raise self.error(key, f"must be above 0, found {value}")
        return value

    def optional_number(self, key: str) -> float | None:
        """Return a finite number, or None if absent or null."""
        return self._number(key, 0.0) if self.has(key) else None

    def boolean(self, key: str, default: bool) -> bool:
        """Return true or false; null reads as false."""
        value = self.values.get(key, default)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, found {describe(value)}")
        return value

    def optional_string(self, key: str) -> str | None:
        """Return a string, or None if absent or null."""
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self.error(key, f"must be a string, found {describe(value)}")

    def object(self, key: str) -> dict[str, Any]:
        """Return a JSON object; absent or null reads as empty."""
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, found {describe(value)}")
        return value

    def token_ids(self, key: str, default: int | None) -> tuple[int, ...]:
        """Return the ids of an integer, a list of integers, or null (none)."""
        value = self.values.get(key, default)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise self.error(key, f"must hold token ids, found {describe(value)}")
        return tuple(dict.fromkeys(ids))

    def _number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, f"must be a number, found {describe(value)}")
        if not math.isfinite(value):
            raise self.error(key, f"must be finite, found {value}")
        return float(value)
