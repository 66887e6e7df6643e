"""What kernel launches share: programmatic dependent launch.

With it a kernel starts while its predecessor in the stream still runs, and reads weights before it
waits for it. The rule that keeps this right: every program of such a kernel calls `await_inputs`
before it reads what another kernel wrote and before it writes anything. See NVIDIA's CUDA
Programming Guide, section Programmatic Dependent Launch.

A multiprocessor cannot move the border between its cache and its shared memory while programs run
on it. Where kernels overlap, one that uses no shared memory would leave too little of it for the
next: so all kernels ask for the same border, with as much shared memory as there is.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl

_LOGGER = logging.getLogger(__name__)
_FIRST_CAPABILITY = (9, 0)  # Hopper
_PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # CUfunction_attribute of the CUDA driver API
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


def _prefer_shared_memory(_module: object, function: int, name: str, *_unused: object) -> None:
    """Called by Triton with each kernel that it has loaded; `function` is its CUfunction."""
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuFuncSetAttribute(
        ctypes.c_void_p(function), _PREFERRED_SHARED_MEMORY_CARVEOUT, 100
    )
    if status:
        _LOGGER.warning("%s: CUDA error %d on asking for shared memory; slower", name, status)


triton.knobs.runtime.kernel_load_end_hook.add(_prefer_shared_memory)


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """Wait until all that earlier kernels wrote is visible, and let the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
