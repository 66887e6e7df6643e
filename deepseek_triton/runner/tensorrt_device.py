"""The CUDA that the TensorRT runner needs, without PyTorch: memory, copies, graphs, one kernel.

Through the driver API (package cuda-bindings) in the device's primary context, which TensorRT uses
as well. The kernel is compiled by NVRTC when the engine is loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from deepseek_triton.config import label
from deepseek_triton.errors import ConfigError

# One block of threads for each token and pool. UNIT is the widest type that divides a row.
KERNEL = """
extern "C" __global__ void write_rows(
    const unsigned long long* pools, const unsigned long long* rows,
    const int* slots, const int* tails, int units)
{
    const int slot = slots[blockIdx.x];
    if (slot < 0) return;
    const UNIT* source = (const UNIT*)rows[blockIdx.y] + (size_t)blockIdx.x * units;
    UNIT* target = (UNIT*)pools[blockIdx.y] + (size_t)slot * units;
    for (int i = threadIdx.x; i < units; i += blockDim.x) target[i] = source[i];
    const UNIT zero = {};
    const int cleared = tails[blockIdx.x] * units;
    for (int i = threadIdx.x; i < cleared; i += blockDim.x) target[units + i] = zero;
}
"""
_UNITS = (("uint4", 16), ("uint2", 8), ("unsigned int", 4), ("unsigned short", 2))
_THREADS = 128
_OLDEST_ARCHITECTURE = "compute_75"  # what TensorRT-RTX runs on; the driver compiles for newer ones


class Device(Protocol):
    """What the runner does with a GPU. Everything is in the order of one stream."""

    @property
    def stream(self) -> int:
        """Handle of the stream, as TensorRT takes it."""

    def allocate(self, nbytes: int) -> int:
        """Return the address of zeroed memory on 256 bytes; ConfigError if none is left."""

    def pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return a host array that copies need no staging for."""

    def upload(self, address: int, array: NDArray[Any]) -> None:
        """Start a copy of a contiguous host array to the device."""

    def download(self, array: NDArray[Any], address: int) -> None:
        """Start a copy into a contiguous host array."""

    def write_rows(
        self, pools: int, rows: int, counts: tuple[int, int], slots: int, tails: int, nbytes: int
    ) -> None:
        """Write rows of `nbytes` each into pools.

        `pools` and `rows` are addresses of arrays of addresses (uint64), one for each pool; `slots`
        and `tails` of int32 arrays, one element for each row; counts = (rows, pools). Row i goes to
        row slots[i] of the pool unless that is negative, and tails[i] rows after it become zero.
        """

    def record(self, work: Callable[[], None]) -> Any:
        """Return a graph of what `work` puts into the stream, without running it."""

    def launch(self, graph: Any) -> None:
        """Run a recorded graph."""

    def synchronize(self) -> None:
        """Wait until the stream is done; raises RuntimeError for an error on the device."""

    def free_memory(self) -> int:
        """Bytes that can still be allocated."""

    def close(self) -> None:
        """Free everything; idempotent."""


def compile_kernel(row_bytes: int) -> tuple[bytes, int]:
    """Return the PTX of the kernel for rows of `row_bytes`, and the units of a row; needs no GPU.

    Raises:
        ConfigError: NVRTC is missing.
    """
    unit, size = next((name, size) for name, size in _UNITS if row_bytes % size == 0)
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ConfigError(_INSTALL.format(error=error)) from error
    try:
        program = _checked(nvrtc.nvrtcCreateProgram(KERNEL.encode(), b"rows.cu", 0, [], []))
    except RuntimeError as error:  # the library is loaded by the first call
        raise ConfigError(_INSTALL.format(error=error)) from error
    options = [f"--gpu-architecture={_OLDEST_ARCHITECTURE}".encode(), f"-DUNIT={unit}".encode()]
    _checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
    ptx = bytes(_checked(nvrtc.nvrtcGetPTXSize(program)))
    _checked(nvrtc.nvrtcGetPTX(program, ptx))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return ptx, row_bytes // size


_INSTALL = (
    "running a TensorRT engine needs the packages cuda-bindings and nvidia-cuda-nvrtc ({error}): "
    ".venv/bin/pip install -e '.[tensorrt]'"
)


class CudaDevice:
    """Device number `index` of this process."""

    def __init__(self, index: int = 0) -> None:
        """Open the device.

        Raises:
            ConfigError: there is no driver or no such device, or a package is missing.
        """
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise ConfigError(_INSTALL.format(error=error)) from error
        self._cuda = driver
        try:
            _checked(driver.cuInit(0))
            self._handle = _checked(driver.cuDeviceGet(index))
        except RuntimeError as error:
            raise ConfigError(
                f"GPU {index} cannot be used ({error}); check nvidia-smi, or build the engine with "
                "TARGET=onnxruntime"
            ) from error
        self._context = _checked(driver.cuDevicePrimaryCtxRetain(self._handle))
        _checked(driver.cuCtxSetCurrent(self._context))
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = _checked(driver.cuStreamCreate(flags))
        self._memory: list[int] = []
        self._pinned: list[int] = []
        self._graphs: list[Any] = []
        self._kernels: dict[int, tuple[Any, int]] = {}
        self._closed = False

    @property
    def stream(self) -> int:
        """See Device.stream."""
        return int(self._stream)

    def allocate(self, nbytes: int) -> int:
        """See Device.allocate."""
        status, address = self._cuda.cuMemAlloc(max(nbytes, 1))
        if status != self._cuda.CUresult.CUDA_SUCCESS:
            raise ConfigError(
                f"{nbytes:,} bytes cannot be allocated on the GPU, {self.free_memory():,} are "
                f"free: lower {label('kv_cache_memory_fraction')}, or build with smaller limits"
            )
        self._memory.append(int(address))
        _checked(self._cuda.cuMemsetD8Async(address, 0, max(nbytes, 1), self._stream))
        return int(address)

    def pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """See Device.pinned."""
        nbytes = max(int(np.prod(shape)) * np.dtype(dtype).itemsize, 1)
        address = int(_checked(self._cuda.cuMemHostAlloc(nbytes, 0)))
        self._pinned.append(address)
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        return np.ndarray(shape, dtype, np.ctypeslib.as_array(memory))

    def upload(self, address: int, array: NDArray[Any]) -> None:
        """See Device.upload."""
        source = array.ctypes.data
        _checked(self._cuda.cuMemcpyHtoDAsync(address, source, array.nbytes, self._stream))

    def download(self, array: NDArray[Any], address: int) -> None:
        """See Device.download."""
        target = array.ctypes.data
        _checked(self._cuda.cuMemcpyDtoHAsync(target, address, array.nbytes, self._stream))

    def write_rows(
        self, pools: int, rows: int, counts: tuple[int, int], slots: int, tails: int, nbytes: int
    ) -> None:
        """See Device.write_rows."""
        function, units = self._kernel(nbytes)
        values = (pools, rows, slots, tails, units)
        types = (*[ctypes.c_void_p] * 4, ctypes.c_int)
        _checked(
            self._cuda.cuLaunchKernel(
                function,
                *(counts[0], counts[1], 1),
                *(_THREADS, 1, 1),
                *(0, self._stream),
                (values, types),
                0,
            )
        )

    def record(self, work: Callable[[], None]) -> Any:
        """See Device.record."""
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _checked(self._cuda.cuStreamBeginCapture(self._stream, mode))
        try:
            work()
        finally:
            graph = _checked(self._cuda.cuStreamEndCapture(self._stream))
        executable = _checked(self._cuda.cuGraphInstantiate(graph, 0))
        _checked(self._cuda.cuGraphDestroy(graph))
        self._graphs.append(executable)
        return executable

    def launch(self, graph: Any) -> None:
        """See Device.launch."""
        _checked(self._cuda.cuGraphLaunch(graph, self._stream))

    def synchronize(self) -> None:
        """See Device.synchronize."""
        _checked(self._cuda.cuStreamSynchronize(self._stream))

    def free_memory(self) -> int:
        """See Device.free_memory."""
        return int(_checked(self._cuda.cuMemGetInfo())[0])

    def close(self) -> None:
        """See Device.close."""
        if self._closed:
            return
        self._closed = True
        self._cuda.cuStreamSynchronize(self._stream)
        for graph in self._graphs:
            self._cuda.cuGraphExecDestroy(graph)
        for address in self._memory:
            self._cuda.cuMemFree(address)
        for address in self._pinned:
            self._cuda.cuMemFreeHost(address)
        self._cuda.cuStreamDestroy(self._stream)
        self._cuda.cuDevicePrimaryCtxRelease(self._handle)

    def _kernel(self, row_bytes: int) -> tuple[Any, int]:
        if row_bytes not in self._kernels:
            ptx, units = compile_kernel(row_bytes)
            module = _checked(self._cuda.cuModuleLoadData(ptx))
            function = _checked(self._cuda.cuModuleGetFunction(module, b"write_rows"))
            self._kernels[row_bytes] = (function, units)
        return self._kernels[row_bytes]


def _checked(result: tuple[Any, ...]) -> Any:
    """Return what a driver or NVRTC call gave; raises RuntimeError that names the error code."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {getattr(status, 'name', status)}")
    return values[0] if len(values) == 1 else values
