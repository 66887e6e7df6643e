"""What has to be set before any test module is imported."""

from __future__ import annotations

import os

# GPU kernels run in Triton's interpreter, which it chooses when it is imported, by whatever test.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Beside other workers, threads of PyTorch and NumPy wait for each other longer than they compute.
if "PYTEST_XDIST_WORKER" in os.environ:
    for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(_name, "1")
