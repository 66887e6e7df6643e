from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from deepseek_triton.errors import ConfigError
from deepseek_triton.gateway.errors import ApiError
from deepseek_triton.gateway.keys import KeyRing, new_key


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"keys": list(entries)}))
    stat = path.stat()  # a file system's clock may be coarse
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + len(path.read_bytes()) * 1000))
    return path


def refusal(ring: KeyRing, authorization: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ring.admit(authorization)
    return caught.value


def test_only_keys_of_the_file_are_let_in_and_the_file_holds_none(tmp_path: Path) -> None:
    key, entry = new_key("a")
    path = write(tmp_path / "keys", entry)
    assert key not in path.read_text()
    ring = KeyRing(path)
    ring.admit(f"Bearer {key}")
    ring.admit(f"bearer  {key} ")
    assert ring.name_of(f"Bearer {key}") == "a"
    for wrong in ("", "Bearer", "Bearer ", f"Basic {key}", key, f"Bearer {key}x"):
        error = refusal(ring, wrong)
        assert (error.status, error.code) == (401, "invalid_api_key")
    assert len({new_key("a")[0] for _ in range(10)}) == 10


def test_a_minutes_requests_are_earned_back_bit_by_bit(tmp_path: Path) -> None:
    clock = Clock()
    key, entry = new_key("a")
    ring = KeyRing(write(tmp_path / "keys", {**entry, "requests_per_minute": 6}), clock)
    for _ in range(6):
        ring.admit(f"Bearer {key}")()
    error = refusal(ring, f"Bearer {key}")
    assert (error.status, error.headers["Retry-After"]) == (429, "10")
    clock.now += 9.0
    assert refusal(ring, f"Bearer {key}").headers["Retry-After"] == "1"
    clock.now += 1.0
    ring.admit(f"Bearer {key}")()
    refusal(ring, f"Bearer {key}")
    clock.now += 3600
    for _ in range(6):
        ring.admit(f"Bearer {key}")()
    refusal(ring, f"Bearer {key}")


def test_requests_that_run_take_places(tmp_path: Path) -> None:
    key, entry = new_key("a")
    other, other_entry = new_key("b")
    ring = KeyRing(write(tmp_path / "keys", {**entry, "max_concurrent": 2}, other_entry))
    leave = ring.admit(f"Bearer {key}")
    ring.admit(f"Bearer {key}")
    error = refusal(ring, f"Bearer {key}")
    assert (error.status, error.headers["Retry-After"]) == (429, "1")
    ring.admit(f"Bearer {other}")
    leave()
    ring.admit(f"Bearer {key}")


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "keys"
    (first, first_entry), (second, second_entry) = new_key("a"), new_key("second")
    ring = KeyRing(write(path, first_entry), clock)
    write(path, second_entry)
    ring.admit(f"Bearer {first}")  # looked at once a second
    clock.now += 1.1
    ring.admit(f"Bearer {second}")
    refusal(ring, f"Bearer {first}")
    for spoil in (lambda: path.write_text("{"), path.unlink):
        spoil()
        clock.now += 1.1
        ring.admit(f"Bearer {second}")
        refusal(ring, f"Bearer {first}")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"keys": {}}',
        '{"keys": [], "more": 1}',
        '{"keys": [5]}',
        '{"keys": [{"name": "a"}]}',
        '{"keys": [{"name": "a", "sha256": "xyz"}]}',
        json.dumps({"keys": [{"name": "a", "sha256": "0" * 64, "rate": 5}]}),
        json.dumps({"keys": [{"name": "", "sha256": "0" * 64}]}),
        json.dumps({"keys": [{"name": "a", "sha256": "0" * 64, "max_concurrent": 0}]}),
        json.dumps({"keys": [{"name": "a", "sha256": "0" * 64, "max_concurrent": True}]}),
        json.dumps({"keys": [{"name": "a", "sha256": d * 64} for d in "01"]}),
        json.dumps({"keys": [{"name": n, "sha256": "0" * 64} for n in "ab"]}),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"^API_KEYS \(--api-keys\): .*keys"):
        KeyRing(path)


def test_an_empty_list_is_refused_with_the_form_that_is_wanted(tmp_path: Path) -> None:
    said = r'^API_KEYS \(--api-keys\): .*: keys: the list is empty.*"sha256".*--new-key'
    with pytest.raises(ConfigError, match=said):
        KeyRing(write(tmp_path / "keys"))


def test_a_list_that_is_emptied_later_lets_nobody_in(tmp_path: Path) -> None:
    clock = Clock()
    key, entry = new_key("a")
    path = write(tmp_path / "keys", entry)
    ring = KeyRing(path, clock)
    ring.admit(f"Bearer {key}")
    write(path)
    clock.now += 2
    assert refusal(ring, f"Bearer {key}").status == 401


def test_a_file_that_is_not_there_is_told_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^API_KEYS \(--api-keys\): .*nowhere"):
        KeyRing(tmp_path / "nowhere")
