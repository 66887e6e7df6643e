"""Kernels run in Triton's interpreter here, which must be chosen before triton is imported."""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

if any(importlib.util.find_spec(name) is None for name in ("torch", "triton")):
    collect_ignore_glob = ["test_*.py"]
