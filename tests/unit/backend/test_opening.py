from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from deepseek_triton.backend.opening import context_limit, open_engine
from deepseek_triton.config import EngineConfig
from deepseek_triton.errors import ConfigError, EngineMismatchError

MANIFEST = SimpleNamespace(max_context_len=100)


@pytest.mark.parametrize(("setting", "limit"), [(0, 100), (50, 50), (100, 100)])
def test_the_context_limit_is_the_engines_or_a_smaller_one(setting: int, limit: int) -> None:
    config = EngineConfig(engine_dir="e", max_context_len=setting)
    assert context_limit(config, MANIFEST) == limit


def test_a_larger_context_limit_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"max_context_len \(.*\): 101 is more than the engine's 100"
    ):
        context_limit(EngineConfig(engine_dir="e", max_context_len=101), MANIFEST)


def test_a_folder_that_is_no_engine_says_what_to_rebuild(tmp_path: Path) -> None:
    with pytest.raises(EngineMismatchError, match="make engine"):
        open_engine(EngineConfig(engine_dir=str(tmp_path)))
