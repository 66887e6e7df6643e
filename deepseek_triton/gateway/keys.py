"""API keys: who may ask, how often, and how much at a time.

The key file is JSON. It holds no key, only SHA-256 of each: keys are long and random, so that no
slower hash would make one harder to find.

    {"keys": [{"name": "team-a", "sha256": "…", "requests_per_minute": 60, "max_concurrent": 8}]}
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_triton.arguments import naming
from deepseek_triton.checkpoint.fields import read_json_object
from deepseek_triton.errors import CheckpointError, ConfigError
from deepseek_triton.gateway.errors import ApiError

_logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # at most so often the file's time is looked at
_HEX_DIGITS = 64
_FORM = (
    'write {"keys": [{"name": "team-a", "sha256": "…"}]} with the entries that '
    "`python -m deepseek_triton.gateway --new-key NAME` prints"
)


@dataclass(frozen=True)
class ApiKey:
    """One entry of the key file; None = no limit."""

    name: str
    sha256: str
    requests_per_minute: int | None = None
    max_concurrent: int | None = None


def new_key(name: str) -> tuple[str, dict[str, Any]]:
    """Return a fresh key, and its entry for the key file."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    return key, {"name": name, "sha256": _digest(key)}


def read_key_file(path: Path, *, may_be_empty: bool = False) -> dict[str, ApiKey]:
    """Return the entries of a key file by digest; raises ConfigError naming what is wrong."""
    with naming("--api-keys"):
        return _read_keys(path, may_be_empty)


def _read_keys(path: Path, may_be_empty: bool) -> dict[str, ApiKey]:
    try:
        content = read_json_object(path)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    entries = content.get("keys")
    if content.keys() != {"keys"} or not isinstance(entries, list):
        raise ConfigError(f"{path}: the field keys alone is expected: {_FORM}")
    if not entries and not may_be_empty:
        raise ConfigError(f"{path}: keys: the list is empty, so nobody could ask; {_FORM}")
    keys: dict[str, ApiKey] = {}
    for index, entry in enumerate(entries):
        key = _read_entry(entry, f"{path}: keys[{index}]")
        if key.sha256 in keys or key.name in {other.name for other in keys.values()}:
            raise ConfigError(f"{path}: keys[{index}]: {key.name!r} is there twice")
        keys[key.sha256] = key
    return keys


def _read_entry(entry: object, where: str) -> ApiKey:
    known = set(ApiKey.__dataclass_fields__)
    if not isinstance(entry, dict) or not {"name", "sha256"} <= entry.keys() <= known:
        fields = ", ".join(ApiKey.__dataclass_fields__)
        raise ConfigError(f"{where}: needs name and sha256, and may have no more than {fields}")
    name, digest = entry["name"], entry["sha256"]
    if not (isinstance(name, str) and name.isprintable() and name):
        raise ConfigError(f"{where}: name {json.dumps(name)} is not a printable text")
    if not (isinstance(digest, str) and len(digest) == _HEX_DIGITS and _is_hex(digest)):
        raise ConfigError(f"{where}: sha256 is not {_HEX_DIGITS} hexadecimal digits")
    limits: Mapping[str, Any] = {key: entry.get(key) for key in known - {"name", "sha256"}}
    for key, value in limits.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{where}: {key} {json.dumps(value)} is not a whole number above 0")
    return ApiKey(name, digest.lower(), **limits)


class KeyRing:
    """The keys of a file as it is now, and what their owners are doing.

    A file that turns unreadable leaves the keys as they were, so that a slip of the pen locks
    nobody out and lets nobody in.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file; raises ConfigError."""
        self._path = path
        self._clock = clock
        self._stamp = self._read_stamp()
        self._keys = read_key_file(path)
        self._next_look = clock() + _LOOK_S
        self._usage: dict[str, _Usage] = {}

    def admit(self, authorization: str) -> Callable[[], None]:
        """Check an Authorization header and take a place; call what is returned at the end.

        Raises ApiError 401 for a wrong or missing key, 429 beyond one of its limits.
        """
        self._reload()
        scheme, _, secret = authorization.partition(" ")
        key = self._keys.get(_digest(secret.strip())) if scheme.lower() == "bearer" else None
        if key is None:
            raise _no_such_key(bool(secret.strip()))
        usage = self._usage.setdefault(key.sha256, _Usage(self._clock()))
        usage.take(key, self._clock())
        return usage.leave

    def name_of(self, authorization: str) -> str:
        """Return the name of the key in an Authorization header, "" if unknown."""
        key = self._keys.get(_digest(authorization.partition(" ")[2].strip()))
        return "" if key is None else key.name

    def _reload(self) -> None:
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            # Empty here: the last key was taken back, and its owner must not stay in.
            self._keys = read_key_file(self._path, may_be_empty=True)
        except ConfigError as error:
            _logger.error("the keys stay as they were: %s", error)
        else:
            _logger.info("%s: %d keys", self._path, len(self._keys))

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


class _Usage:
    """A token bucket that holds a minute's worth, and the number of requests that run."""

    def __init__(self, now: float) -> None:
        self._active = 0
        self._spent = 0.0  # requests that have not been earned back
        self._at = now

    def take(self, key: ApiKey, now: float) -> None:
        if key.max_concurrent is not None and self._active >= key.max_concurrent:
            raise _too_many(f"{key.max_concurrent} requests of this key run already", 1)
        if key.requests_per_minute is not None:
            rate = key.requests_per_minute / 60.0
            self._spent = max(0.0, self._spent - (now - self._at) * rate)
            self._at = now
            wait = (self._spent + 1.0 - key.requests_per_minute) / rate
            if wait > 0:
                message = f"this key may send {key.requests_per_minute} requests a minute"
                raise _too_many(message, math.ceil(wait))
            self._spent += 1.0
        self._active += 1

    def leave(self) -> None:
        self._active -= 1


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _is_hex(text: str) -> bool:
    return all(character in "0123456789abcdefABCDEF" for character in text)


def _no_such_key(sent: bool) -> ApiError:
    message = "incorrect API key" if sent else "no API key; send Authorization: Bearer KEY"
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _too_many(message: str, retry_after_s: int) -> ApiError:
    return ApiError(
        429,
        f"{message}; try again in {retry_after_s} s",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(retry_after_s)},
    )
