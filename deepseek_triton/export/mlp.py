"""What follows attention in a layer: a dense gated MLP, or routed and shared experts."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from deepseek_triton.checkpoint.reader import Block
from deepseek_triton.checkpoint.spec import MoESpec, RoutingSpec
from deepseek_triton.export.int4 import add_int4
from deepseek_triton.export.modules import ModuleWriter, Projection
from deepseek_triton.export.weights import interleave_rows
from deepseek_triton.quantize.int4 import Int4Linear, common_group_size

logger = logging.getLogger(__name__)


def gated_mlp(modules: ModuleWriter, x: str, name: str, source: str, size: int) -> str:
    """Append the SwiGLU MLP with `size` hidden units over x [T, D]; return [T, D]."""
    hidden = modules.spec.hidden_size
    both = [Projection(source + "gate_proj", size), Projection(source + "up_proj", size)]
    gate_up = modules.linear(x, f"{name}.gate_up", hidden, both)
    active = modules.graph.node("deepseek.SwiGLU", [gate_up], f"{name}.swiglu")
    return modules.linear(active, f"{name}.down", size, [Projection(source + "down_proj", hidden)])


def mixture_of_experts(modules: ModuleWriter, x: str, name: str, source: str, moe: MoESpec) -> str:
    """Append routing, routed experts and shared experts over x [T, D]; return [T, D]."""
    chosen = _route(modules, x, name, source + "gate", moe.routing)
    routed = _experts(modules, [x, *chosen], f"{name}.experts", source + "experts.", moe)
    if not moe.shared_intermediate_size:
        return routed
    shared = gated_mlp(
        modules, x, f"{name}.shared", source + "shared_experts.", moe.shared_intermediate_size
    )
    return modules.graph.node("Add", [routed, shared], f"{name}.sum")


def _experts(modules: ModuleWriter, inputs: list[str], name: str, source: str, moe: MoESpec) -> str:
    """Append the routed experts over [x, expert_ids, expert_weights]; return [T, D].

    Rows of gate and up are in turn, as ONNX Runtime's MoE kernels read them.
    """
    graph, hidden, size = modules.graph, modules.spec.hidden_size, moe.expert_intermediate_size
    count = moe.routing.num_experts
    attributes = {"num_experts": [count], "top_k": [moe.routing.top_k]}
    shapes = {"gate_up": (count, 2 * size, hidden), "down": (count, hidden, size)}
    experts = [f"{source}{expert}." for expert in range(count)]
    int4 = _int4_experts(modules, experts, source)
    if int4 is not None:
        gate_up, down, group_size = int4
        weights = [
            *add_int4(graph, f"{name}.gate_up", shapes["gate_up"], gate_up, group_size),
            *add_int4(graph, f"{name}.down", shapes["down"], down, group_size),
        ]
        symmetric = all(layer.symmetric for block in (*gate_up, *down) for layer in block)
        return graph.node(
            "deepseek.ExpertsInt4",
            [*inputs, *weights],
            name,
            group_size=group_size,
            symmetric=[int(symmetric)],
            **attributes,
        )

    def rows() -> Iterator[Block]:
        for expert in experts:
            gate = modules.rows(expert + "gate_proj.weight", (size, hidden))
            up = modules.rows(expert + "up_proj.weight", (size, hidden))
            yield from interleave_rows(gate, up)

    def down_rows() -> Iterator[Block]:
        for expert in experts:
            yield from modules.rows(expert + "down_proj.weight", (hidden, size))

    dense = [
        graph.weight(f"{name}.gate_up", shapes["gate_up"], rows()),
        graph.weight(f"{name}.down", shapes["down"], down_rows()),
    ]
    return graph.node("deepseek.Experts", [*inputs, *dense], name, **attributes)


def _int4_experts(
    modules: ModuleWriter, experts: list[str], source: str
) -> tuple[list[tuple[Int4Linear, ...]], list[tuple[Int4Linear, ...]], int] | None:
    """Return the blocks of gate_up and down and their group size; None if they cannot be INT4."""
    names = ("gate_proj", "up_proj", "down_proj")
    layers = [modules.reader.int4(expert + name) for expert in experts for name in names]
    found = [layer for layer in layers if layer is not None]
    if not found:
        return None
    group_size = common_group_size(found)
    ordered = any(layer.input_order is not None for layer in found)
    if len(found) < len(layers) or ordered or group_size is None:
        reason = "have an input order each" if ordered else "are not quantised in one way"
        logger.warning("%s*: the experts %s; they become floating point", source, reason)
        return None
    gate_up: list[tuple[Int4Linear, ...]] = list(zip(found[0::3], found[1::3], strict=True))
    return gate_up, [(layer,) for layer in found[2::3]], group_size


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
        stored = graph.stored(source + ".e_score_correction_bias", [bias], float32=True)
        inputs.append(graph.weight(f"{name}.router.bias", (count,), stored, float32=True))
        attributes["normalize"] = float(routing.normalize)
    if routing.num_groups > 1:
        function += "Grouped"
        attributes |= {"num_groups": [routing.num_groups], "top_groups": [routing.top_groups]}
    outputs = (f"{name}.expert_ids", f"{name}.expert_weights")
    return graph.node_with(function, inputs, f"{name}.route", outputs, **attributes)
