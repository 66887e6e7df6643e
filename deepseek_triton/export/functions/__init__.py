"""DeepSeek's operators as ONNX model-local functions, one file per family.

Bodies are written in ONNX's textual syntax and use standard operators of opset 21 only, so the
model describes itself: a target may inline a call, or replace it by something faster.

Conventions of every function here:
- integer attributes are lists, also of one element: a body can turn a list attribute into the 1-D
  tensor that Reshape, Split and TopK want, so that call and body cannot disagree;
- T = B·S rows of a padded step [B, S]; W = kv_lora_rank + qk_rope_head_dim;
- norms, softmax and routing compute in float32 whatever the model's type.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx.parser

from deepseek_triton.export.functions.attention import ATTENTION_FUNCTIONS
from deepseek_triton.export.functions.experts import EXPERT_FUNCTIONS
from deepseek_triton.export.functions.linear import LINEAR_FUNCTIONS
from deepseek_triton.export.functions.norm import NORM_FUNCTIONS
from deepseek_triton.export.functions.rotary import ROTARY_FUNCTIONS
from deepseek_triton.export.functions.routing import ROUTING_FUNCTIONS

DOMAIN = "deepseek"
DOMAIN_VERSION = 1
OPSET = 21
"""Newest opset that TensorRT 10.14 parses."""


def define_function(text: str) -> onnx.FunctionProto:
    """Parse one function; the comment lines above its header become its doc_string.

    `text` holds leading `#` lines, then `Name <attributes> (inputs) => (outputs) { body }`.
    """
    lines = text.strip().splitlines()
    first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    header = f'<domain: "{DOMAIN}", opset_import: ["": {OPSET}, "{DOMAIN}": {DOMAIN_VERSION}]>'
    function = onnx.parser.parse_function("\n".join([header, *lines[first:]]))
    function.doc_string = "\n".join(line.removeprefix("#").strip() for line in lines[:first])
    return function


def function_library() -> dict[str, onnx.FunctionProto]:
    """Return every function by name, freshly parsed: the caller may edit the protos."""
    texts = (
        *LINEAR_FUNCTIONS,
        *NORM_FUNCTIONS,
        *ROTARY_FUNCTIONS,
        *ATTENTION_FUNCTIONS,
        *ROUTING_FUNCTIONS,
        *EXPERT_FUNCTIONS,
    )
    return {function.name: function for function in map(define_function, texts)}


def functions_used(nodes: Iterable[onnx.NodeProto]) -> list[onnx.FunctionProto]:
    """Return the library's functions that `nodes` call, directly or through each other."""
    library = function_library()
    found: dict[str, onnx.FunctionProto] = {}
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node.domain == DOMAIN and node.op_type not in found:
            found[node.op_type] = library[node.op_type]
            pending.extend(library[node.op_type].node)
    return [found[name] for name in sorted(found)]
