"""What became of the graph on its way to the engine: node counts by type, before and after."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx
import onnx.inliner

from deepseek_triton.export.functions import DOMAIN

logger = logging.getLogger(__name__)

REPORT_FILE = "graph_report.json"

# Products that the exporter makes of several linear layers of the checkpoint, by the last part of
# their name.
_MERGED = {"q_kv_a": 2, "qkv": 3, "gate_up": 2}


@dataclass(frozen=True)
class MergedProducts:
    """Linear layers of one kind that read the same input and became one product."""

    linear_layers: int  # in the checkpoint
    products: int  # in the portable model


@dataclass(frozen=True)
class GraphReport:
    """Node counts of one model; a CastLike counts as the Cast that it becomes."""

    calls: dict[str, int]  # of each DeepSeek function in the portable model
    merged: dict[str, MergedProducts]
    portable: dict[str, int]  # standard operators when every call is replaced by its body
    built: dict[str, int]  # operators of the model that the target runs or compiles

    def summary(self) -> str:
        """Return the report in one line."""
        kinds = ("Cast", "Transpose", "Reshape", "Constant")
        changes = [f"{k} {self.portable.get(k, 0)} → {self.built.get(k, 0)}" for k in kinds]
        merged = [f"{m.linear_layers} layers in {m.products} {n}" for n, m in self.merged.items()]
        total = f"{sum(self.portable.values())} → {sum(self.built.values())} nodes"
        return "; ".join([total, ", ".join(changes), "merged " + (", ".join(merged) or "nothing")])


def describe_portable(model_path: Path) -> GraphReport:
    """Count the nodes of a portable model; `built` is empty."""
    model = onnx.load_model(model_path, load_external_data=False)
    calls = Counter(node.op_type for node in model.graph.node if node.domain == DOMAIN)
    products = Counter(
        node.name.rsplit(".", 1)[-1]
        for node in model.graph.node
        if node.op_type.startswith("Linear") and node.domain == DOMAIN
    )
    merged = {
        name: MergedProducts(products[name] * layers, products[name])
        for name, layers in _MERGED.items()
        if products[name]
    }
    return GraphReport(dict(sorted(calls.items())), merged, _count(model), {})


def write_report(folder: Path, portable: GraphReport, built: Path) -> GraphReport:
    """Log the report, with the model `built` as what came out; write it into `folder`."""
    model = onnx.load_model(built, load_external_data=False)
    report = GraphReport(portable.calls, portable.merged, portable.portable, _count(model))
    text = json.dumps(asdict(report), indent=1) + "\n"
    (folder / REPORT_FILE).write_text(text, encoding="utf-8")
    logger.info("graph: %s", report.summary())
    return report


def _count(model: onnx.ModelProto) -> dict[str, int]:
    """Count operators by type, ascending by name, calls replaced by their bodies."""
    flat = onnx.inliner.inline_local_functions(model)
    names = ("Cast" if n.op_type == "CastLike" else n.op_type for n in flat.graph.node)
    return dict(sorted(Counter(names).items()))
