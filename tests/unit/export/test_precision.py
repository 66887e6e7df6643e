from __future__ import annotations

import pytest

from deepseek_triton.errors import ConfigError
from deepseek_triton.export.precision import find_precision


def test_an_unknown_precision_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'int3' is unknown; choose one of fp32"):
        find_precision("int3")


def test_fp32_is_known() -> None:
    assert find_precision("fp32").name == "fp32"
