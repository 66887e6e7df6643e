"""Mixture of experts and its routing, from config.json."""

from __future__ import annotations

from deepseek_triton.checkpoint.families import ExpertDefaults
from deepseek_triton.checkpoint.fields import Fields
from deepseek_triton.checkpoint.spec import Architecture, MoESpec, RoutingSpec

MAX_EXPERTS = 65536


def read_experts(fields: Fields, architecture: Architecture, defaults: ExpertDefaults) -> MoESpec:
    """Return the experts of the layers that have some."""
    expert_size = fields.required_integer(
        "moe_intermediate_size", "the width of an expert", defaults.moe_intermediate_size
    )
    shared = fields.optional_integer("n_shared_experts", defaults.n_shared_experts, minimum=0) or 0
    return MoESpec(
        routing=_routing(fields, architecture, defaults),
        expert_intermediate_size=expert_size,
        shared_intermediate_size=shared * expert_size,
    )


def _routing(fields: Fields, architecture: Architecture, defaults: ExpertDefaults) -> RoutingSpec:
    num_experts = fields.required_integer(
        "n_routed_experts", "the experts of a layer", defaults.n_routed_experts, MAX_EXPERTS
    )
    if fields.has("num_experts_per_tok") or defaults.num_experts_per_tok is None:
        top_k = fields.required_integer("num_experts_per_tok", "the experts that a token takes")
    else:
        top_k = defaults.num_experts_per_tok
    v3 = architecture == "deepseek_v3"
    num_groups = top_groups = 1
    if v3:
        num_groups = fields.integer("n_group", 8)
        top_groups = fields.integer("topk_group", 4)
    elif fields.optional_string("topk_method") == "group_limited_greedy":
        num_groups = fields.required_integer("n_group", "group_limited_greedy needs it")
        top_groups = fields.required_integer("topk_group", "group_limited_greedy needs it")
    _check_groups(fields, num_experts, top_k, num_groups, top_groups)
    if v3 and num_experts // num_groups < 2:
        raise fields.error("n_group", "must leave two experts a group: their scores are summed")
    return RoutingSpec(
        kind="sigmoid" if v3 else "softmax",
        num_experts=num_experts,
        top_k=top_k,
        num_groups=num_groups,
        top_groups=top_groups,
        scaling_factor=fields.positive("routed_scaling_factor", defaults.routed_scaling_factor),
        normalize=v3 and fields.boolean("norm_topk_prob", True),
    )


def _check_groups(
    fields: Fields, num_experts: int, top_k: int, num_groups: int, top_groups: int
) -> None:
    if num_experts % num_groups:
        raise fields.error("n_group", f"{num_groups} does not divide {num_experts} experts")
    if top_groups > num_groups:
        raise fields.error("topk_group", f"{top_groups} is more than n_group {num_groups}")
    choice = top_groups * (num_experts // num_groups)
    if top_k > choice:
        raise fields.error(
            "num_experts_per_tok", f"{top_k} is more than the {choice} experts to choose from"
        )
