"""What has to be set before any test module is imported."""

from __future__ import annotations

import os

# GPU kernels run in Triton's interpreter, which it chooses when it is imported, by whatever test.
os.environ.setdefault("TRITON_INTERPRET", "1")
