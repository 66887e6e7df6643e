from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepseek_triton.errors import ConfigError
from deepseek_triton.runner import tensorrt_device as module
from deepseek_triton.runner.tensorrt_device import CudaDevice, compile_kernel
from tests.unit.runner.fake_tensorrt import FakeDevice

try:
    from cuda.bindings import nvrtc

    nvrtc.nvrtcVersion()
    NVRTC = True
except (ImportError, RuntimeError):
    NVRTC = False

# The kernel as plain C++: one thread after another.
HARNESS = """
#include <cstddef>
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct Index { int x, y; };
static Index blockIdx, threadIdx, blockDim;
#define __global__
%s
extern "C" void launch(const unsigned long long* pools, const unsigned long long* rows,
    const int* slots, const int* tails, int units, int tokens, int num_pools, int threads)
{
    blockDim.x = threads;
    for (blockIdx.y = 0; blockIdx.y < num_pools; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < tokens; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
                write_rows(pools, rows, slots, tails, units);
}
"""


@pytest.mark.skipif(not NVRTC, reason="pip install -e '.[tensorrt]'")
@pytest.mark.parametrize(("row_bytes", "units"), [(1152, 72), (24, 3), (36, 9), (6, 3)])
def test_the_kernel_compiles_for_every_width_of_a_row(row_bytes: int, units: int) -> None:
    ptx, found = compile_kernel(row_bytes)
    assert found == units
    assert b".entry write_rows(" in ptx and b".target sm_75" in ptx


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
@pytest.mark.parametrize(("unit", "row_bytes"), [("uint4", 48), ("unsigned short", 6)])
def test_the_kernel_writes_what_the_device_protocol_says(
    tmp_path: Path, unit: str, row_bytes: int
) -> None:
    source, library = tmp_path / "rows.cpp", tmp_path / "rows.so"
    source.write_text(HARNESS % module.KERNEL)
    command = ["g++", "-shared", "-fPIC", f"-DUNIT={unit}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    rng, device = np.random.default_rng(0), FakeDevice()
    tokens, num_pools, slots_in_pool = 5, 3, 40
    slots = np.array([7, -1, 31, 8, 20], np.int32)
    tails = np.array([0, 0, 4, 3, 0], np.int32)
    addresses = {}
    for name, count in (("mine", slots_in_pool), ("kernel", slots_in_pool), ("rows", tokens)):
        addresses[name] = [device.allocate(count * row_bytes) for _ in range(num_pools)]
    for i in range(num_pools):
        old = rng.integers(1, 255, (slots_in_pool, row_bytes), dtype=np.uint8)
        device.upload(addresses["mine"][i], old)
        device.upload(addresses["kernel"][i], old)
        new = rng.integers(1, 255, (tokens, row_bytes), dtype=np.uint8)
        device.upload(addresses["rows"][i], new)
    arrays = {name: np.array(values, np.uint64) for name, values in addresses.items()}
    places = {name: device.allocate(array.nbytes) for name, array in arrays.items()}
    for name, array in arrays.items():
        device.upload(places[name], array)
    device_slots, device_tails = device.allocate(slots.nbytes), device.allocate(tails.nbytes)
    device.upload(device_slots, slots)
    device.upload(device_tails, tails)
    counts = (tokens, num_pools)
    device.write_rows(places["mine"], places["rows"], counts, device_slots, device_tails, row_bytes)
    size = {"uint4": 16, "unsigned short": 2}[unit]
    pointers = (places["kernel"], places["rows"], device_slots, device_tails)
    launch = ctypes.CDLL(str(library)).launch
    launch(*map(ctypes.c_void_p, pointers), row_bytes // size, *counts, 4)
    for mine, kernel in zip(addresses["mine"], addresses["kernel"], strict=True):
        shape = (slots_in_pool, row_bytes)
        found = device.view(kernel, shape, np.uint8)
        np.testing.assert_array_equal(found, device.view(mine, shape, np.uint8))
        assert not found[[32, 33, 34, 35, 9, 10, 11]].any()
        assert found[[7, 31, 8, 20, 36, 12]].all()


def test_a_missing_package_or_driver_says_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ConfigError, match=r"cuda-bindings.*\.\[tensorrt\]"):
        CudaDevice()
    with pytest.raises(ConfigError, match="cuda-bindings"):
        compile_kernel(16)
    monkeypatch.undo()
    if NVRTC and not Path("/dev/nvidiactl").exists():
        with pytest.raises(ConfigError, match="GPU 0 cannot be used .* TARGET=onnxruntime"):
            CudaDevice()
