from __future__ import annotations

from pathlib import Path

import pytest

from deepseek_triton.errors import ServerError
from deepseek_triton.server.shared_memory import (
    check_space,
    new_region_prefix,
    remove_regions,
)


def test_only_files_of_the_own_prefix_are_removed(tmp_path: Path) -> None:
    mine, other = new_region_prefix(), new_region_prefix()
    for name in (f"{mine}a", f"{mine}b", f"{other}a"):
        (tmp_path / name).touch()
    assert remove_regions(mine, tmp_path) == 2
    assert [p.name for p in tmp_path.iterdir()] == [f"{other}a"]


def test_too_little_space_states_size_and_docker_flag(tmp_path: Path) -> None:
    check_space(tmp_path, min_free_bytes=1)
    with pytest.raises(ServerError, match=r"MiB free and .* needed.*--shm-size"):
        check_space(tmp_path, min_free_bytes=1 << 62)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="missing"):
        check_space(tmp_path / "shm")
