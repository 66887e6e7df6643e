"""The gated activation between two linear layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.launch import await_inputs, dependent_launch

_BLOCK = 1024


def swiglu(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return silu(gate) · up (arXiv 2002.05202) of gate_up [M, 2·F], gate first: [M, F].

    Any float dtype, computed in float32. Rows must be contiguous.
    """
    rows, features = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty(rows, features, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[(rows, triton.cdiv(features, _BLOCK))](
        gate_up, out, features, gate_up.stride(0), out.stride(0),
        BLOCK=_BLOCK, **dependent_launch(gate_up),
    )  # fmt: skip
    return out


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute `swiglu` in float64 and round once."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


@triton.jit
def _swiglu(
    gate_up_ptr, out_ptr, features, in_stride, out_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = f < features
    await_inputs(PDL)
    gate_row = gate_up_ptr + row * in_stride
    gate = tl.load(gate_row + f, mask=valid, other=0).to(tl.float32)
    up = tl.load(gate_row + features + f, mask=valid, other=0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + f, gate * tl.sigmoid(gate) * up, mask=valid)
