"""Kernels run in Triton's interpreter here, which must be chosen before triton is imported."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("torch")
pytest.importorskip("triton")
