"""The device: what it must be, how much memory it has left."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_triton.config import labels
from deepseek_triton.errors import ConfigError
from deepseek_triton.kv_cache.sizing import available_memory
from deepseek_triton.kv_cache.spec import KVCacheSpec

_OLDEST_CAPABILITY = (8, 0)  # bfloat16 on tensor cores; what the kernels are written for


def open_device(name: str) -> torch.device:
    """Return the device called `name` ("cuda", "cuda:1" or "cpu").

    Raises:
        ConfigError: there is no such device, or it is too old.
    """
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        built = torch.version.cuda or "without CUDA"
        raise ConfigError(
            f"{name}: PyTorch {torch.__version__} ({built}) finds no usable NVIDIA GPU; check "
            "`nvidia-smi`, and that the driver is at least as new as the CUDA version of PyTorch; "
            "or build the engine with TARGET=onnxruntime"
        )
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ConfigError(f"{name}: this machine has {torch.cuda.device_count()} GPUs")
    capability = torch.cuda.get_device_capability(index)
    if capability < _OLDEST_CAPABILITY:
        raise ConfigError(
            f"{torch.cuda.get_device_name(index)}: compute capability "
            f"{capability[0]}.{capability[1]}; the kernels need 8.0 (A100) or newer"
        )
    return torch.device("cuda", index)


def free_memory(device: torch.device) -> int:
    """Bytes that may still be allocated on `device`, cached ones that are free included."""
    if device.type != "cuda":
        return available_memory()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def allocate_pools(
    spec: KVCacheSpec, names: list[str], num_blocks: int, device: torch.device
) -> dict[str, Tensor]:
    """Return zeroed pools [num_blocks + 1, block_size, W]; the last block takes padding.

    Raises:
        ConfigError: they do not fit.
    """
    dtype = getattr(torch, spec.dtype)
    shape = (num_blocks + 1, spec.block_size, spec.width)
    needed, free = spec.bytes_per_block * (num_blocks + 1), free_memory(device)
    if needed > free:
        raise ConfigError(
            f"{num_blocks} KV blocks need {needed:,} bytes on {device}, {free:,} are free: lower "
            + labels("kv_cache_num_blocks", "kv_cache_memory_mb", "kv_cache_memory_fraction")
        )
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name in names}


def sent(host: Tensor, device: torch.device) -> Tensor:
    """Return `host` on the device, without waiting for what the device has to do before."""
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


class Mark:
    """A point in what the device has been given to do."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def set(self) -> None:
        """Mark what has been given so far, in the place of an earlier mark."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Return once that is done; at once if nothing was marked, or the device is the CPU."""
        if self._event is not None:
            self._event.synchronize()
