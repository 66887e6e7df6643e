"""What follows attention in a layer: a dense gated MLP, or routed and shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from deepseek_triton.checkpoint.spec import MoESpec, RoutingSpec
from deepseek_triton.export.modules import ModuleWriter, Projection
from deepseek_triton.export.weights import interleave_rows


def gated_mlp(modules: ModuleWriter, x: str, name: str, source: str, size: int) -> str:
    """Append the SwiGLU MLP with `size` hidden units over x [T, D]; return [T, D]."""
    hidden = modules.spec.hidden_size
    both = [Projection(source + "gate_proj", size), Projection(source + "up_proj", size)]
    gate_up = modules.linear(x, f"{name}.gate_up", hidden, both)
    active = modules.graph.node("deepseek.SwiGLU", [gate_up], f"{name}.swiglu")
    return modules.linear(active, f"{name}.down", size, [Projection(source + "down_proj", hidden)])


def mixture_of_experts(modules: ModuleWriter, x: str, name: str, source: str, moe: MoESpec) -> str:
    """Append routing, routed experts and shared experts over x [T, D]; return [T, D]."""
    graph, hidden, size = modules.graph, modules.spec.hidden_size, moe.expert_intermediate_size
    count = moe.routing.num_experts
    expert_ids, expert_weights = _route(modules, x, name, source + "gate", moe.routing)
    experts = [f"{source}experts.{expert}." for expert in range(count)]

    def rows() -> Iterator[NDArray[Any]]:
        """Rows of gate and up in turn, as ONNX Runtime's MoE kernels read them."""
        for expert in experts:
            gate = modules.reader.require(expert + "gate_proj.weight", (size, hidden))
            up = modules.reader.require(expert + "up_proj.weight", (size, hidden))
            yield from interleave_rows(gate, up)

    def down_rows() -> Iterator[NDArray[Any]]:
        for expert in experts:
            yield modules.reader.require(expert + "down_proj.weight", (hidden, size))

    gate_up = graph.weight(f"{name}.experts.gate_up", (count, 2 * size, hidden), rows())
    down = graph.weight(f"{name}.experts.down", (count, hidden, size), down_rows())
    routed = graph.node(
        "deepseek.Experts",
        [x, expert_ids, expert_weights, gate_up, down],
        f"{name}.experts",
        num_experts=[count],
        top_k=[moe.routing.top_k],
    )
    if not moe.shared_intermediate_size:
        return routed
    shared = gated_mlp(
        modules, x, f"{name}.shared", source + "shared_experts.", moe.shared_intermediate_size
    )
    return graph.node("Add", [routed, shared], f"{name}.sum")


def _route(
    modules: ModuleWriter, x: str, name: str, source: str, routing: RoutingSpec
) -> tuple[str, str]:
    """Append the router over x [T, D]: expert_ids [T, K] int64, expert_weights [T, K] float32."""
    graph, hidden, count = modules.graph, modules.spec.hidden_size, routing.num_experts
    wide = graph.float32(x, f"{name}.router.float32")
    router = Projection(source, count)
    inputs = [modules.linear(wide, f"{name}.router", hidden, [router], float32=True)]
    attributes: dict[str, list[int] | float] = {
        "top_k": [routing.top_k],
        "scaling_factor": routing.scaling_factor,
    }
    function = "deepseek.RouteSoftmax"
    if routing.kind == "sigmoid":
        function = "deepseek.RouteSigmoid"
        bias = modules.reader.require(source + ".e_score_correction_bias", (count,))
        inputs.append(graph.weight(f"{name}.router.bias", (count,), [bias], float32=True))
        attributes["normalize"] = float(routing.normalize)
    if routing.num_groups > 1:
        function += "Grouped"
        attributes |= {"num_groups": [routing.num_groups], "top_groups": [routing.top_groups]}
    outputs = (f"{name}.expert_ids", f"{name}.expert_weights")
    return graph.pair(function, inputs, f"{name}.route", outputs, **attributes)
