"""The shared expert as routed experts that every token chooses.

An MLP S times as wide as an expert is the sum of S experts of weight 1. So one grouped product runs
both, and the two kernels of the shared expert are saved.
"""

from __future__ import annotations

from dataclasses import replace

from deepseek_triton.runner.cuda_program import Call, FoldedTensor, Program, StoredTensor

_WEIGHT_INPUTS = {"cuda.MoE": 1, "cuda.MoEInt4": 3}
_FIRST_WEIGHT = 4  # after x, norm weight, router, router bias


def fold_shared_experts(program: Program) -> Program:
    """Return the program with every cuda.MoE call folded that can be.

    A folded call has `num_shared` = S > 0 and no inputs for the shared expert; another one has
    `num_shared` = 0 and keeps them.
    """
    tensors = dict(program.tensors)
    calls = [_fold(call, tensors) if call.op in _WEIGHT_INPUTS else call for call in program.calls]
    return replace(program, tensors=tensors).with_calls(calls)


def _fold(call: Call, tensors: dict[str, StoredTensor | FoldedTensor]) -> Call:
    count = _WEIGHT_INPUTS[call.op]
    begin = _FIRST_WEIGHT
    routed = call.inputs[begin : begin + 2 * count]
    shared = call.inputs[begin + 2 * count :]
    folded = _pairs(routed, shared, tensors, count)
    if not folded:
        return replace(call, attributes={**call.attributes, "num_shared": 0})
    names = [f"{name}.with_shared" for name in routed]
    tensors.update(zip(names, folded, strict=True))
    columns = folded[count].shared.shape[1] // folded[count].routed.shape[2]
    attributes = {**call.attributes, "num_shared": columns}
    return replace(call, inputs=(*call.inputs[:begin], *names), attributes=attributes)


def _pairs(
    routed: tuple[str, ...],
    shared: tuple[str, ...],
    tensors: dict[str, StoredTensor | FoldedTensor],
    count: int,
) -> list[FoldedTensor]:
    """Return the folded weights in the order of the inputs; none if they cannot be cut evenly."""
    if len(shared) != len(routed):
        return []  # there is none, or it is not quantised as the routed ones are
    folded = []
    for i, (name, other) in enumerate(zip(routed, shared, strict=True)):
        ours, theirs = tensors[name], tensors[other]
        if not isinstance(ours, StoredTensor) or not isinstance(theirs, StoredTensor):
            return []
        by_rows = i < count
        axis = 0 if by_rows else 1
        if (
            theirs.shape[axis] % ours.shape[1 + axis]
            or theirs.shape[1 - axis] != (ours.shape[2 - axis])
        ):
            return []
        folded.append(FoldedTensor(ours, theirs, by_rows))
    return folded
