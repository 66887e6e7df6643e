"""The portable ONNX model as a list of calls: what the cuda runner executes.

Nothing is inlined: a call of `deepseek.LatentAttention` stays one, and cuda_ops.py has one
implementation for each. What the runner does in its own way is left out: rows are packed rather
than padded, so one gather takes the rows whose logits are wanted; masks are implied by lengths; and
new KV rows go straight into the pools.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from deepseek_triton.errors import EngineMismatchError

LOGIT_ROWS = "logit_rows"
LOGITS, SQUARED_NORMS, HIDDEN = "logits", "squared_norms", "hidden"
"""What a run gives (export/portable.py): `hidden` [T, D] only where a draft model reads it, and
`squared_norms` [T, 1] not of a draft model."""
_LAST = "last"  # the portable node that picks one hidden row for each row of the batch
_MASK = "deepseek.AttentionMask"


@dataclass(frozen=True)
class Call:
    """One node: `op` is an ONNX operator, `deepseek.X`, or `cuda.X` for several of them fused."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]

    def number(self, name: str) -> int:
        """Return an integer attribute, which deepseek functions keep as a list of one."""
        value = self.attributes[name]
        return int(value[0] if isinstance(value, Sequence) else value)


@dataclass(frozen=True)
class StoredTensor:
    """An initializer: its bytes in the weights file, or its value when it is in the model file."""

    name: str
    shape: tuple[int, ...]
    onnx_type: int
    offset: int
    nbytes: int
    value: NDArray[Any] | None = None


@dataclass(frozen=True)
class FoldedTensor:
    """A weight of the routed experts [E, …] with that of the shared expert as S more of them.

    The shared expert is an MLP S times as wide as a routed one: `by_rows` cuts its gate_up
    [2·S·F, D], gate first, whose rows are interleaved as those of the routed experts are; else its
    down [D, S·F] is cut by columns.
    """

    routed: StoredTensor
    shared: StoredTensor
    by_rows: bool

    @property
    def nbytes(self) -> int:
        """Bytes in the weights file."""
        return self.routed.nbytes + self.shared.nbytes


@dataclass(frozen=True)
class Program:
    """Calls in execution order, and the weights that they read."""

    calls: tuple[Call, ...]
    tensors: dict[str, StoredTensor | FoldedTensor]
    weights_path: Path | None  # None: every value is in the model file

    def with_calls(self, calls: Iterable[Call]) -> Program:
        """Return the program with other calls, without the tensors that none of them reads."""
        kept = tuple(calls)
        read = {name for call in kept for name in call.inputs}
        tensors = {name: tensor for name, tensor in self.tensors.items() if name in read}
        return replace(self, calls=kept, tensors=tensors)

    def functions(self) -> set[str]:
        """Return the names of all operators that are called."""
        return {call.op for call in self.calls}


def read_program(model_path: Path) -> Program:
    """Read the portable model at `model_path`; weights stay in their file.

    Raises:
        EngineMismatchError: it cannot be read, or is not a portable model.
    """
    try:
        model = onnx.load_model(model_path, load_external_data=False)
    except Exception as error:  # protobuf's and onnx's own types have no common base of theirs
        raise EngineMismatchError(f"{model_path}: not an ONNX model ({error})") from error
    return program_of(model, model_path)


def program_of(model: onnx.ModelProto, model_path: Path) -> Program:
    """As `read_program`, of a model in memory; its weights file is beside `model_path`."""
    calls = [_call(node) for node in model.graph.node]
    tensors = [_stored(tensor) for tensor in model.graph.initializer]
    locations = {
        entry.value
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    if len(locations) > 1:
        raise EngineMismatchError(f"{model_path}: weights in several files {sorted(locations)}")
    outputs = {LOGITS, SQUARED_NORMS, HIDDEN}.intersection(
        output.name for output in model.graph.output
    )
    program = Program(
        tuple(_needed(_take_logit_rows(calls, model_path), outputs)),
        {tensor.name: tensor for tensor in tensors},
        model_path.with_name(locations.pop()) if locations else None,
    )
    return program.with_calls(program.calls)


def map_weights(program: Program) -> mmap.mmap | None:
    """Map the weights file, privately; None when there is none.

    Raises:
        EngineMismatchError: it is missing or shorter than the model says.
    """
    if program.weights_path is None:
        return None
    end = max((t.offset + t.nbytes for t in _stored_tensors(program)), default=0)
    try:
        with program.weights_path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise EngineMismatchError(f"{program.weights_path}: cannot be mapped: {error}") from error
    if len(mapped) < end:
        raise EngineMismatchError(
            f"{program.weights_path}: {len(mapped)} bytes, the model reads {end}; "
            "build it again with `make engine`"
        )
    return mapped


def _stored_tensors(program: Program) -> Iterator[StoredTensor]:
    for tensor in program.tensors.values():
        yield from (
            (tensor.routed, tensor.shared) if isinstance(tensor, FoldedTensor) else (tensor,)
        )


def _call(node: onnx.NodeProto) -> Call:
    op = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return Call(op, tuple(node.input), tuple(node.output), attributes)


def _stored(tensor: onnx.TensorProto) -> StoredTensor:
    shape = tuple(tensor.dims)
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        value = numpy_helper.to_array(tensor)
        return StoredTensor(tensor.name, shape, tensor.data_type, 0, 0, value)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    offset, length = int(entries.get("offset", 0)), int(entries["length"])
    return StoredTensor(tensor.name, shape, tensor.data_type, offset, length)


def _take_logit_rows(calls: list[Call], path: Path) -> list[Call]:
    """Pick hidden rows by logit_rows [R] rather than one in each padded row of a batch."""
    producers = {output: call for call in calls for output in call.outputs}
    try:
        batched = producers[producers[_LAST].inputs[0]]
    except (KeyError, IndexError):
        raise EngineMismatchError(f"{path}: not a portable model, it has no {_LAST!r}") from None
    gather = Call("Gather", (batched.inputs[0], LOGIT_ROWS), (_LAST,), {"axis": 0})
    return [gather if _LAST in call.outputs else call for call in calls]


def _needed(calls: list[Call], outputs: set[str]) -> list[Call]:
    """Drop the mask and what neither `outputs` nor another call reads."""
    needed, kept = set(outputs), []
    for call in reversed(calls):
        if call.op != _MASK and needed.intersection(call.outputs):
            needed.update(call.inputs)
            kept.append(call)
    return kept[::-1]


def numpy_dtype(onnx_type: int) -> np.dtype[Any]:
    """Return the NumPy (or ml_dtypes) dtype of an ONNX element type."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(onnx_type))
