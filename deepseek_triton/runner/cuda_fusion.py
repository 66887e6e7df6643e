"""Neighbouring calls made one, so that a decode step is few kernels.

At one token a kernel costs some 3 µs whatever it does, so a layer's time is its number of kernels
as much as its bytes. What fuses is what a kernel can do in passing:

    RMSNorm ─▶ Linear ─▶ SwiGLU     cuda.Linear: norms its rows first, gates its result
    Linear ─▶ Add                   cuda.Linear: adds the residual at the end
    RMSNorm ─▶ router ─▶ experts    cuda.MoE: the whole block, from the hidden state before its norm
           └─▶ shared expert        to the one after its residual; its parts are chosen at run time

A call is absorbed only when nothing else reads what it makes.

Inputs of the fused calls, where W is one name for a float weight and three for an INT4 one (codes,
scales, zero points), and an input that is not there has the name "":

    cuda.Linear, cuda.LinearInt4   x, W, bias, norm weight, residual (overwritten if `in_place`)
    cuda.MoE, cuda.MoEInt4         x, norm weight, router, router bias, W gate_up, W down,
                                   W shared gate_up, W shared down (float ones if `shared_float`)
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from deepseek_triton.runner.cuda_program import Call, Program

NONE = ""
_LINEARS = {"deepseek.Linear": 1, "deepseek.LinearBias": 1, "deepseek.LinearInt4": 3}
"""Operators that become cuda.Linear or cuda.LinearInt4, and how many inputs their weight is."""
_FUSED_LINEARS = ("cuda.Linear", "cuda.LinearInt4")
_EXPERTS = {"deepseek.Experts": "cuda.MoE", "deepseek.ExpertsInt4": "cuda.MoEInt4"}
_MAKERS = (*_FUSED_LINEARS, *_EXPERTS.values())
"""Operators whose results are tensors of their own, not views."""


def fuse(program: Program) -> Program:
    """Return the program with its calls fused as the table above says."""
    graph = _Graph(program)
    for call in program.calls:
        if call.op in _LINEARS:
            graph.replace(call, _unified(call))
    passes = (_absorb_swiglu, _absorb_bias, _fuse_moe, _absorb_norm, _absorb_residual, _reuse)
    for absorb in passes:
        for call in list(graph.calls):
            absorb(graph, call)
    return program.with_calls(graph.calls)


class _Graph:
    """Calls in order, with who makes and how many read each value."""

    def __init__(self, program: Program) -> None:
        self.calls = list(program.calls)
        self.weights = program.tensors
        self._index()

    def producer(self, name: str, *ops: str) -> Call | None:
        """The call that makes `name`, if it is one of `ops`."""
        call = self._producers.get(name)
        return call if call is not None and call.op in ops else None

    def alone(self, name: str, *ops: str) -> Call | None:
        """As `producer`, if besides one call nothing reads what it makes."""
        return self.producer(name, *ops) if self._uses[name] == 1 else None

    def uses(self, name: str) -> int:
        """How many inputs read the value."""
        return self._uses[name]

    def replace(self, last: Call, new: Call, *absorbed: Call) -> None:
        """Put `new` in the place of `last`, whose outputs it makes, and drop the others."""
        gone = {id(call) for call in absorbed}
        self.calls = [new if call is last else call for call in self.calls if id(call) not in gone]
        self._index()

    def _index(self) -> None:
        self._producers = {output: call for call in self.calls for output in call.outputs}
        self._uses = Counter(name for call in self.calls for name in call.inputs)


def _unified(call: Call) -> Call:
    x, *rest = call.inputs
    weight, bias = rest[: _LINEARS[call.op]], rest[_LINEARS[call.op] :]
    op = "cuda.LinearInt4" if call.op == "deepseek.LinearInt4" else "cuda.Linear"
    inputs = (x, *weight, *(bias or [NONE]), NONE, NONE)
    attributes = {**call.attributes, "epsilon": 0.0, "swiglu": False, "in_place": False}
    return Call(op, inputs, call.outputs, attributes)


def _absorb_swiglu(graph: _Graph, call: Call) -> None:
    if call.op != "deepseek.SwiGLU":
        return
    linear = graph.alone(call.inputs[0], *_FUSED_LINEARS)
    if linear is not None:
        graph.replace(call, _changed(linear, outputs=call.outputs, swiglu=True), linear)


def _absorb_bias(graph: _Graph, call: Call) -> None:
    """The bias of an INT4 product is an Add after it."""
    linear, bias = _linear_and_other(graph, call)
    if linear is None or linear.attributes["swiglu"] or bias not in graph.weights:
        return
    if linear.inputs[-3] == NONE:
        graph.replace(call, _changed(linear, outputs=call.outputs, bias=bias), linear)


def _absorb_norm(graph: _Graph, call: Call) -> None:
    if call.op not in _FUSED_LINEARS:
        return
    norm = graph.alone(call.inputs[0], "deepseek.RMSNorm")
    if norm is not None:
        x, weight = norm.inputs
        epsilon = norm.attributes["epsilon"]
        graph.replace(call, _changed(call, x=x, norm=weight, epsilon=epsilon), norm)


def _absorb_residual(graph: _Graph, call: Call) -> None:
    linear, residual = _linear_and_other(graph, call)
    if linear is None or linear.inputs[-1] != NONE or residual in graph.weights:
        return
    graph.replace(call, _changed(linear, outputs=call.outputs, residual=residual), linear)


def _reuse(graph: _Graph, call: Call) -> None:
    """The sum may take the residual's place if nothing reads that later, or through a view."""
    residual = call.inputs[-1] if call.op in _FUSED_LINEARS else NONE
    maker = graph.producer(residual, *_MAKERS, "Gather")
    if maker is None or (maker.op == "Gather" and maker.inputs[0] not in graph.weights):
        return  # or it may be a view: of all rows, or of some
    readers = [other for other in graph.calls if residual in other.inputs]
    if readers[-1] is call and all(other.op in (*_MAKERS, "deepseek.RMSNorm") for other in readers):
        graph.replace(call, _changed(call, in_place=True))


def _linear_and_other(graph: _Graph, call: Call) -> tuple[Call | None, str]:
    """For an Add of a product that nothing else reads: the product, and what is added to it."""
    if call.op == "Add":
        for product, other in (call.inputs, call.inputs[::-1]):
            linear = graph.alone(product, *_FUSED_LINEARS)
            if linear is not None:
                return linear, other
    return None, NONE


def _fuse_moe(graph: _Graph, call: Call) -> None:
    """Match from the experts backwards to the norm, and forwards to the residual."""
    if call.op not in _EXPERTS:
        return
    normed, ids, weights, *experts = call.inputs
    norm = graph.producer(normed, "deepseek.RMSNorm")
    route = graph.producer(ids, *(f"deepseek.Route{kind}" for kind in _ROUTES))
    router = graph.alone(route.inputs[0], "cuda.Linear") if route is not None else None
    if norm is None or route is None or router is None or weights not in route.outputs:
        return
    cast = graph.alone(router.inputs[0], "Cast")
    added = _only_reader(graph, call.outputs[0], "Add")
    if added is None or (cast.inputs[0] if cast is not None else router.inputs[0]) != normed:
        return
    shared = _shared_expert(graph, added, call.outputs[0], normed)
    last = _only_reader(graph, added.outputs[0], "Add") if shared else added
    if last is None or graph.uses(normed) != 2 + bool(shared) or norm.inputs[0] not in last.inputs:
        return
    bias = route.inputs[1] if len(route.inputs) > 1 else NONE
    fused = Call(
        _EXPERTS[call.op],
        (norm.inputs[0], norm.inputs[1], router.inputs[1], bias, *experts, *_weights(shared)),
        last.outputs,
        {
            **call.attributes,
            **route.attributes,
            "route": route.op,
            "epsilon": norm.attributes["epsilon"],
            "shared_float": bool(shared) and shared[0].op == "cuda.Linear",
        },
    )
    absorbed = [norm, route, router, call, *shared, *([cast] if cast is not None else [])]
    graph.replace(last, fused, *absorbed, *([added] if shared else []))


_ROUTES = ("Softmax", "SoftmaxGrouped", "Sigmoid", "SigmoidGrouped")


def _shared_expert(graph: _Graph, added: Call, routed: str, normed: str) -> list[Call]:
    """The two products of the shared expert whose result `added` adds to `routed`; or nothing."""
    other = next((name for name in added.inputs if name != routed), NONE)
    down = graph.alone(other, *_FUSED_LINEARS)
    gate_up = graph.alone(down.inputs[0], *_FUSED_LINEARS) if down is not None else None
    if down is None or gate_up is None or gate_up.inputs[0] != normed:
        return []
    plain = all(call.inputs[-3:] == (NONE,) * 3 for call in (gate_up, down))
    same = gate_up.op == down.op and gate_up.attributes["swiglu"]
    return [gate_up, down] if plain and same else []


def _weights(shared: list[Call]) -> list[str]:
    return [name for call in shared for name in call.inputs[1:-3]]


def _only_reader(graph: _Graph, name: str, op: str) -> Call | None:
    readers = [call for call in graph.calls if name in call.inputs]
    return readers[0] if len(readers) == 1 and readers[0].op == op else None


def _changed(
    linear: Call,
    *,
    x: str | None = None,
    bias: str | None = None,
    norm: str | None = None,
    residual: str | None = None,
    outputs: tuple[str, ...] | None = None,
    **attributes: Any,
) -> Call:
    """Return the fused product with some inputs, outputs or attributes of its own replaced."""
    old_x, *weight, old_bias, old_norm, old_residual = linear.inputs
    inputs = (
        old_x if x is None else x,
        *weight,
        old_bias if bias is None else bias,
        old_norm if norm is None else norm,
        old_residual if residual is None else residual,
    )
    attributes = {**linear.attributes, **attributes}
    return Call(linear.op, inputs, outputs or linear.outputs, attributes)
