"""What kernel launches share: programmatic dependent launch.

With it a kernel starts while its predecessor in the stream still runs, and reads weights before it
waits for it. The rule that keeps this right: every program of such a kernel calls `await_inputs`
before it reads what another kernel wrote and before it writes anything. Only behind a kernel that
calls `await_and_release` may it read sooner what was written before that one. See NVIDIA's CUDA
Programming Guide, section Programmatic Dependent Launch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl

_FIRST_CAPABILITY = (9, 0)  # Hopper
_in_turn = False


@contextmanager
def launches_in_turn(enabled: bool = True) -> Iterator[None]:
    """Inside, a kernel starts when its predecessor has ended. Not thread-safe.

    Overlap pays where kernels are short; large ones it robs of room on the multiprocessors.
    """
    global _in_turn
    before, _in_turn = _in_turn, enabled
    try:
        yield
    finally:
        _in_turn = before


def dependent_launch(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the launch arguments, on `tensor`'s device, of a kernel that follows the rule."""
    if (
        tensor.is_cuda
        and not _in_turn
        and _capability(tensor.device.index or 0) >= _FIRST_CAPABILITY
    ):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """Wait until all that earlier kernels wrote is visible, and let the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def await_and_release(PDL: tl.constexpr):
    """As `await_inputs`, but let the next kernel start only after the wait.

    All programs have then seen what earlier kernels wrote, so the next one may read it at once.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
