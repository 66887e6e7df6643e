from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from deepseek_triton.kernels.latent_decode_hopper import fits

# The interpreter does not run Gluon, but its compiler needs no GPU.
COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource

from deepseek_triton.kernels.latent_decode_hopper import _latent_splits

sizes = dict(HEADS={heads}, DIM={dim}, ROPE={rope}, BLOCK_SIZE=64, BLOCK_H={block_h}, PDL={pdl})
types = dict(tables_ptr="*i32", lens_ptr="*i32", lse_ptr="*fp32", scale="fp32")
names = _latent_splits.arg_names
signature = dict.fromkeys(names, "*{dtype}") | dict.fromkeys(names[7:10], "i32") | types
signature |= dict.fromkeys(sizes, "constexpr")
numbers = [i for i, name in enumerate(names) if name not in sizes and name != "scale"]
attributes = {{(i,): [["tt.divisibility", 16]] for i in numbers}}
source = GluonASTSource(_latent_splits, signature=signature, constexprs=sizes, attrs=attributes)
options = dict(num_warps=8 if {block_h} == 64 else 4)
kernel = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
print(kernel.metadata.shared, kernel.asm["ptx"].count("cp.async.cg"), "wgmma" in kernel.asm["ptx"])
"""


@pytest.mark.parametrize(
    ("heads", "dim", "rope", "block_h", "dtype", "pdl"),
    [
        (16, 512, 64, 16, "bf16", True),
        (128, 512, 64, 64, "bf16", False),
        (5, 64, 16, 16, "fp16", 0),
    ],
)
def test_it_compiles_for_hopper(
    heads: int, dim: int, rope: int, block_h: int, dtype: str, pdl: bool
) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    code = COMPILE.format(**locals() | {"pdl": bool(pdl)})
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr[-2000:]
    shared, copies, tensor_cores = run.stdout.split()
    assert int(shared) <= 232_448  # what a program may have there
    assert int(copies) > 0  # 16 bytes at a time
    assert tensor_cores == "True"


def test_elsewhere_the_portable_kernel_runs() -> None:
    q, pool = torch.zeros(1, 16, 576, dtype=torch.bfloat16), torch.zeros(2, 64, 576)
    assert not fits(q, pool, 512)
