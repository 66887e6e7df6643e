"""What an engine file holds, as JSON: TensorRT's own inspector needs a GPU, this does not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepseek_triton.build.limits import CallLimits
from deepseek_triton.build.strict_json import to_plain
from deepseek_triton.build.trt_builder import Profile

SIDECAR_FILE = "model.engine.json"


def write_sidecar(
    trt: Any,
    network: Any,
    profiles: Sequence[Profile],
    limits: CallLimits,
    engine_path: Path,
) -> Path:
    """Write the description of the engine compiled from `network` beside it; return its path.

    Layers are those of the parsed network, before TensorRT fuses them.
    """
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    types = [_type_name(layer.type) for layer in layers]
    description = {
        "versions": {trt.__name__: str(trt.__version__)},
        "engine_bytes": engine_path.stat().st_size,
        "limits": to_plain(limits),
        "inputs": [_tensor(network.get_input(i)) for i in range(network.num_inputs)],
        "outputs": [_tensor(network.get_output(i)) for i in range(network.num_outputs)],
        "profiles": {
            profile.name: {
                name: dict(zip(("min", "opt", "max"), map(list, shapes), strict=True))
                for name, shapes in profile.shapes.items()
            }
            for profile in profiles
        },
        "layer_counts": dict(sorted(Counter(types).items())),
        "layers": [f"{kind} {layer.name}" for kind, layer in zip(types, layers, strict=True)],
    }
    path = engine_path.with_name(SIDECAR_FILE)
    path.write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    return path


def _tensor(tensor: Any) -> dict[str, object]:
    return {
        "name": tensor.name,
        "dtype": _type_name(tensor.dtype),
        "shape": list(tensor.shape),  # −1 = dynamic
    }


def _type_name(value: Any) -> str:
    """Return the name of a member of one of TensorRT's enumerations, in lower case."""
    return str(value).rsplit(".", 1)[-1].lower()
