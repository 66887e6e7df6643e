"""TensorRT and a GPU in host memory: the engine is the ONNX model, run by ONNX Runtime.

What the real ones only punish by wrong results is an error here: shapes outside the active profile,
addresses outside an allocation or too close to its end, a context that runs unbound, or that was
changed after a graph was recorded of it.
"""

from __future__ import annotations

import ctypes
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 256


class FakeDevice:
    """Implements runner.tensorrt_device.Device; everything runs at once, or into a recording."""

    streams: dict[int, FakeDevice] = {}

    def __init__(self, memory: int = 1 << 30) -> None:
        self.stream = len(self.streams) + 1
        self.streams[self.stream] = self
        self.log: list[str] = []
        self.closed = False
        self._free = memory
        self._buffers: dict[int, NDArray[np.uint8]] = {}
        self._recording: list[Callable[[], None]] | None = None

    def allocate(self, nbytes: int) -> int:
        whole = np.zeros(nbytes + ALIGNMENT, np.uint8)
        skipped = -whole.ctypes.data % ALIGNMENT
        buffer = whole[skipped : skipped + nbytes]
        self._buffers[buffer.ctypes.data] = buffer
        self._free -= nbytes
        return buffer.ctypes.data

    def pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        return np.full(shape, 77, dtype)

    def upload(self, address: int, array: NDArray[Any]) -> None:
        assert array.flags.c_contiguous
        self.view(address, array.shape, array.dtype)[...] = array

    def download(self, array: NDArray[Any], address: int) -> None:
        assert array.flags.c_contiguous
        array[...] = self.view(address, array.shape, array.dtype)

    def write_rows(
        self, pools: int, rows: int, counts: tuple[int, int], slots: int, tails: int, nbytes: int
    ) -> None:
        self.submit(lambda: self._write(pools, rows, counts, slots, tails, nbytes))

    def _write(
        self, pools: int, rows: int, counts: tuple[int, int], slots: int, tails: int, nbytes: int
    ) -> None:
        self.log.append("write_rows")
        tokens, num_pools = counts
        places = self.view(slots, (tokens,), np.int32), self.view(tails, (tokens,), np.int32)
        for pool, source in zip(
            self.view(pools, (num_pools,), np.uint64),
            self.view(rows, (num_pools,), np.uint64),
            strict=True,
        ):
            new = self.view(int(source), (tokens, nbytes), np.uint8)
            for i, (slot, tail) in enumerate(zip(*places, strict=True)):
                if slot >= 0:
                    start = int(pool) + int(slot) * nbytes
                    self.view(start, (nbytes,), np.uint8)[:] = new[i]
                    self.view(start + nbytes, (int(tail) * nbytes,), np.uint8)[:] = 0

    def record(self, work: Callable[[], None]) -> list[Callable[[], None]]:
        self.log.append("record")
        self._recording = []
        work()
        recorded, self._recording = self._recording, None
        return recorded

    def launch(self, graph: list[Callable[[], None]]) -> None:
        self.log.append("launch")
        for work in graph:
            work()

    def submit(self, work: Callable[[], None]) -> None:
        work() if self._recording is None else self._recording.append(work)

    def synchronize(self) -> None:
        assert not self.closed

    def free_memory(self) -> int:
        return self._free

    def close(self) -> None:
        self.closed = True

    def view(self, address: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return device memory as an array; it must lie inside one allocation."""
        assert not self.closed
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        inside = any(
            start <= address and address + nbytes <= start + buffer.size
            for start, buffer in self._buffers.items()
        )
        assert inside or nbytes == 0, f"{nbytes} bytes at {address} are not allocated"
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        return np.frombuffer(memory, dtype).reshape(shape)


class _Tensor:
    def __init__(self, value: onnx.ValueInfoProto) -> None:
        tensor = value.type.tensor_type
        self.name = value.name
        self.dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        self.shape = tuple(-1 if d.dim_param else d.dim_value for d in tensor.shape.dim)


class _Layer:
    def __init__(self, node: onnx.NodeProto) -> None:
        self.name, self.type = node.name, f"LayerType.{node.op_type.upper()}"


class _Network:
    model: onnx.ModelProto

    num_inputs = property(lambda self: len(self.model.graph.input))
    num_outputs = property(lambda self: len(self.model.graph.output))
    num_layers = property(lambda self: len(self.model.graph.node))

    def get_input(self, index: int) -> _Tensor:
        return _Tensor(self.model.graph.input[index])

    def get_output(self, index: int) -> _Tensor:
        return _Tensor(self.model.graph.output[index])

    def get_layer(self, index: int) -> _Layer:
        return _Layer(self.model.graph.node[index])


class _Config:
    progress_monitor: Any = None

    def __init__(self) -> None:
        self.profiles: list[dict[str, Any]] = []

    def add_optimization_profile(self, profile: _Profile) -> int:
        self.profiles.append(profile.shapes)
        return len(self.profiles) - 1


class _Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        self.shapes[name] = shapes


class _Builder:
    error_recorder: Any = None

    def __init__(self, logger: Any) -> None:
        self.network = _Network()

    def create_network(self, flags: int) -> _Network:
        assert flags == 1 << 3, "types must be those of the model"
        return self.network

    def create_builder_config(self) -> _Config:
        return _Config()

    def create_optimization_profile(self) -> _Profile:
        return _Profile()

    def build_serialized_network_to_stream(
        self, network: _Network, config: _Config, writer: Any
    ) -> bool:
        config.progress_monitor.phase_start("all", None, 2)
        if not all(config.progress_monitor.step_complete("all", step) for step in range(2)):
            return False
        config.progress_monitor.phase_finish("all")
        plan = pickle.dumps((network.model.SerializeToString(), config.profiles))
        return bool(writer.write(plan) == len(plan))


class _Parser:
    num_errors = 0

    def __init__(self, network: _Network, logger: Any) -> None:
        self.network = network

    def parse_from_file(self, path: str) -> bool:
        self.network.model = onnx.load_model(Path(path))
        return True


class _Context:
    def __init__(self, engine: _Engine) -> None:
        self.engine = engine
        self.memory: tuple[int, int] | None = None
        self.profile = -1
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.version = 0

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % ALIGNMENT == 0 and size >= self.engine.scratch
        self.memory = (memory, size)

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return stream in FakeDevice.streams

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.version += 1
        least, _, most = self.engine.profiles[self.profile][name]
        self.shapes[name] = shape
        return len(shape) == len(least) and all(
            a <= size <= b for a, size, b in zip(least, shape, most, strict=True)
        )

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.version += 1
        self.addresses[name] = address
        return name in self.engine.names and address % ALIGNMENT == 0

    def execute_async_v3(self, stream: int) -> bool:
        device, version = FakeDevice.streams[stream], self.version

        def work() -> None:
            assert version == self.version, "the context changed after the graph was recorded"
            self._run(device)

        device.submit(work)
        return True

    def _run(self, device: FakeDevice) -> None:
        assert self.memory is not None, "no scratch memory was given"
        device.view(self.memory[0], (self.memory[1],), np.uint8)[:] = 255  # others use it as well
        device.log.append(f"execute {self.profile} {self.shapes['input_ids']}")
        inputs = {
            value.name: device.view(
                self.addresses[value.name],
                self.shapes[value.name],
                np.float32 if "float" in value.type else np.int32,
            )
            for value in self.engine.session.get_inputs()
        }
        for value, result in zip(
            self.engine.session.get_outputs(), self.engine.session.run(None, inputs), strict=True
        ):
            device.view(self.addresses[value.name], result.shape, result.dtype)[...] = result


class _Engine:
    scratch = 4096

    def __init__(self, plan: bytes) -> None:
        model, self.profiles = pickle.loads(plan)
        self.session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        values = [*self.session.get_inputs(), *self.session.get_outputs()]
        self.names = [value.name for value in values]
        self.num_io_tensors = len(self.names)
        self.contexts: list[_Context] = []

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return self.scratch if profile else self.scratch // 2

    def create_execution_context(self, strategy: str) -> _Context:
        assert strategy == "user managed"
        self.contexts.append(_Context(self))
        return self.contexts[-1]


class _Runtime:
    def __init__(self, logger: Any) -> None:
        pass

    def deserialize_cuda_engine(self, content: Any) -> _Engine | None:
        plan = bytes(content)
        return None if plan.startswith(b"other") else _Engine(plan)


class _Base:
    """TensorRT's callback interfaces, loggers included."""

    INTERNAL_ERROR, ERROR, WARNING = range(3)

    def __init__(self, *arguments: Any) -> None:
        pass


class _Flags:
    STRONGLY_TYPED = 3


class _Strategy:
    USER_MANAGED = "user managed"


def fake_tensorrt() -> ModuleType:
    """Return a module that stands for `tensorrt`."""
    module = ModuleType("tensorrt")
    contents = {
        "__version__": "10.14.1",
        "Builder": _Builder,
        "OnnxParser": _Parser,
        "Runtime": _Runtime,
        "NetworkDefinitionCreationFlag": _Flags,
        "ExecutionContextAllocationStrategy": _Strategy,
        **dict.fromkeys(
            ("ILogger", "Logger", "IErrorRecorder", "IProgressMonitor", "IStreamWriter"), _Base
        ),
    }
    vars(module).update(contents)
    return module
