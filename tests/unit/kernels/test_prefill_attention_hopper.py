from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from deepseek_triton.kernels.prefill_attention_hopper import fits

# The interpreter does not run Gluon, but its compiler needs no GPU.
COMPILE = """
import subprocess
import tempfile

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from deepseek_triton.kernels import prefill_attention_hopper as module


def tensor_map(*block):
    layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.{dtype})
    name = dict(bfloat16="bf16", float16="fp16")["{dtype}"]
    return f"tensordesc<{{name}}{{list(block)}},{{layout!r}}>"


kernel = module._prefill_attention_hopper
sizes = dict(
    HEADS=16, SHARING={sharing}, DIM={dim}, ROPE={rope}, N={n}, STAGES={stages}
)
rope = {rope} or {dim}
pointer = dict(bfloat16="*bf16", float16="*fp16")["{dtype}"]
signature = dict(
    q_map=tensor_map(1, 64, {dim}), q_rope_map=tensor_map(1, 64, rope),
    k_map=tensor_map(1, {n}, {dim}), k_rope_map=tensor_map(1, {n}, rope),
    v_map=tensor_map(1, {n}, {dim}), out_ptr=pointer, cu_q_ptr="*i32", cu_k_ptr="*i32",
    scale="fp32", out_token="i32", out_head="i32", **dict.fromkeys(sizes, "constexpr"),
)
attributes = {{
    (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
    for name in ("out_ptr", "out_token", "out_head")
}}
source = GluonASTSource(kernel, signature=signature, constexprs=sizes, attrs=attributes)
options = dict(num_warps=4, maxnreg=module._REGISTERS)
compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
print(compiled.metadata.shared, flush=True)
with tempfile.NamedTemporaryFile() as file:
    file.write(compiled.asm["cubin"])
    file.flush()
    subprocess.run([knobs.nvidia.cuobjdump.path, "-sass", file.name], check=True)
"""


@pytest.mark.parametrize(
    ("sharing", "dim", "rope", "n", "stages", "dtype"),
    [
        (1, 128, 64, 128, 2, "bfloat16"),
        (4, 128, 0, 128, 2, "float16"),
        (1, 64, 16, 64, 3, "float16"),
    ],
)
def test_it_compiles_for_hopper(
    sharing: int, dim: int, rope: int, n: int, stages: int, dtype: str
) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE.format(**locals())],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    shared, code = run.stdout.split("\n", 1)
    assert int(shared) <= 232_448  # what a program may have there
    assert "UTMALDG" in code
    # In both loops of both halves all weights are computed while the values before them are
    # multiplied: between the wait for the scores and the wait for everything.
    during = re.findall(r"DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0", code, re.DOTALL)
    assert len(during) == 4
    for piece in during:
        assert piece.count("MUFU.EX2") >= 64 * n // 128
        assert "LDL" not in piece  # nothing is spilled there


def test_elsewhere_the_portable_kernel_runs() -> None:
    q, k = (torch.zeros(4, 2, width, dtype=torch.bfloat16) for width in (192, 128))
    assert not fits(q, k, k)
