"""INT4 weights bound to the calls that read them, in the order in which the kernels read them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from deepseek_triton.errors import EngineMismatchError
from deepseek_triton.runner.cuda_program import Call, Program

_MOE = "cuda.MoEInt4"
_SMALL_BYTES = 32 << 20  # of a matrix in 16 bits
_PLACES = {
    "deepseek.LinearInt4": (1,),
    "cuda.LinearInt4": (1,),
    "deepseek.ExpertsInt4": (3, 6),
}
"""Where the codes are among a call's inputs; scales and zero points follow them."""


def zero_point_names(program: Program) -> set[str]:
    """Names of the zero points that are needed: of symmetric weights none are."""
    return {
        call.inputs[first + 2] for call, first in _weights(program) if not call.number("symmetric")
    }


def without_symmetric_zero_points(program: Program) -> Program:
    """Return the program without zero points that are 8 everywhere, which then are not loaded."""
    return program.with_calls(_without(call) for call in program.calls)


def bind_int4(program: Program, weights: dict[str, Any]) -> Program:
    """Return the program with one input for each INT4 weight; `weights` gets Int4Tensors.

    Replaces the codes, scales and zero points in `weights`, weight by weight, so that there is
    memory for one copy. Zero points must have been loaded unpacked. Small matrices become dense:
    an H200 reads one in the time that a product with INT4 weights takes in any case.

    Raises:
        EngineMismatchError: a shape or a group size that the kernels do not take.
    """
    from deepseek_triton.kernels.int4_tensor import pack_int4

    for call, first in _weights(program):
        codes, scales, zeros = call.inputs[first : first + 3]
        if codes in weights and scales in weights:
            values = (weights.pop(codes), weights.pop(scales), weights.pop(zeros, None))
            try:
                packed = pack_int4(*values, call.number("group_size"))
                small = 2 * math.prod(packed.shape) <= _SMALL_BYTES
                weights[codes] = packed.dense() if small else packed
            except ValueError as error:
                raise EngineMismatchError(f"{codes}: {error}") from error
    return replace(program, calls=tuple(_bound(call) for call in program.calls))


def _weights(program: Program) -> Iterator[tuple[Call, int]]:
    """Yield each call with the place of its codes among the inputs, once for each weight."""
    for call in program.calls:
        for first in _places(call):
            yield call, first


def _places(call: Call) -> tuple[int, ...]:
    if call.op != _MOE:
        return _PLACES.get(call.op, ())
    apart = len(call.inputs) > 10 and not call.attributes["shared_float"]
    return (4, 7, 10, 13) if apart else (4, 7)


def _without(call: Call) -> Call:
    if not _places(call) or not call.number("symmetric"):
        return call
    gone = {first + 2 for first in _places(call)}
    inputs = tuple("" if i in gone else name for i, name in enumerate(call.inputs))
    return replace(call, inputs=inputs)


def _bound(call: Call) -> Call:
    gone = {first + i for first in _places(call) for i in (1, 2)}
    inputs = tuple(name for i, name in enumerate(call.inputs) if i not in gone)
    return replace(call, inputs=inputs)
