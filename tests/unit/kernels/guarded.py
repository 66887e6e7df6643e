"""Tensors that end where memory ends: a program that reads beyond one is killed."""

from __future__ import annotations

import ctypes
import mmap

import torch

_NO_ACCESS = 0


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor`, followed by a page that cannot be read."""
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start + pages), mmap.PAGESIZE, _NO_ACCESS):
        raise OSError(ctypes.get_errno(), "mprotect")
    array = (ctypes.c_char * size).from_buffer(memory, pages - size)
    copy = torch.frombuffer(array, dtype=tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)
