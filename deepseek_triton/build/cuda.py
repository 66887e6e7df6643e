"""Target "cuda": the portable model as it is, `deepseek.*` calls and weights file untouched.

The runner maps each call to a kernel, so there is nothing to rewrite; what is checked here is that
it will find one for every call.
"""

from __future__ import annotations

from pathlib import Path

import onnx

from deepseek_triton.errors import BuildError
from deepseek_triton.export.functions import DOMAIN
from deepseek_triton.export.portable import DRAFT_FILE

BLOCK_SIZE = 64
"""Tokens in a KV block: what one step of the attention kernels reads."""

OPERATORS = frozenset(
    {
        *("Add", "Cast", "Concat", "Gather", "Identity", "Reshape", "Split"),
        *("Linear", "LinearBias", "LinearInt4", "SwiGLU", "RMSNorm", "SquaredNorm", "RotaryAngles"),
        *("LatentAttention", "GroupedQueryAttention", "Experts", "ExpertsInt4"),
        *("RouteSoftmax", "RouteSoftmaxGrouped", "RouteSigmoid", "RouteSigmoidGrouped"),
    }
)
"""What the runner executes."""

# Masks and the choice of the last rows, which a runner of packed rows does in its own way.
_REPLACED = frozenset({"AttentionMask", "Shape", "Unsqueeze", "GatherND"})


def build(model_path: Path) -> None:
    """Check that the portable model at `model_path`, and its draft, call only what the runner runs.

    Raises:
        BuildError: it calls something else.
    """
    paths = [model_path, model_path.with_name(DRAFT_FILE)]
    models = [onnx.load_model(p, load_external_data=False) for p in paths if p.exists()]
    for node in (node for model in models for node in model.graph.node):
        known = node.op_type in OPERATORS or node.op_type in _REPLACED
        if not known or node.domain not in ("", DOMAIN):
            raise BuildError(
                f"{node.name}: the cuda target does not run {node.op_type}; "
                "build with TARGET=onnxruntime or tensorrt"
            )
