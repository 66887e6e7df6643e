from __future__ import annotations

from pathlib import Path

import numpy as np

from deepseek_triton.calibrate.workspace import map_floats


def test_a_new_file_has_all_its_blocks_before_it_is_mapped(tmp_path: Path) -> None:
    """A full disk is then an OSError, and not the end of the process at some later write."""
    path = tmp_path / "hidden.f32"
    mapped = map_floats(path, (1000, 100), new=True)
    assert not mapped.any()
    assert path.stat().st_blocks * 512 >= path.stat().st_size == mapped.nbytes
    mapped[:] = 1
    mapped.flush()
    np.testing.assert_array_equal(map_floats(path, (1000, 100)), mapped)
