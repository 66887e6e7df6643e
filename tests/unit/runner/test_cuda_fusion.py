from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deepseek_triton.build.pipeline import build_engine  # noqa: E402
from deepseek_triton.checkpoint.presets import preset_config  # noqa: E402
from deepseek_triton.checkpoint.random import write_random_checkpoint  # noqa: E402
from deepseek_triton.runner.cuda_fold import fold_shared_experts  # noqa: E402
from deepseek_triton.runner.cuda_fused_reference import FUSED_REFERENCE  # noqa: E402
from deepseek_triton.runner.cuda_fusion import fuse  # noqa: E402
from deepseek_triton.runner.cuda_kernels import fused_linear, gather  # noqa: E402
from deepseek_triton.runner.cuda_model import CudaModel  # noqa: E402
from deepseek_triton.runner.cuda_program import (  # noqa: E402
    Call,
    FoldedTensor,
    Program,
    read_program,
)
from deepseek_triton.runner.cuda_reference import REFERENCE  # noqa: E402
from deepseek_triton.runner.cuda_step import Prefill, Step  # noqa: E402
from deepseek_triton.runner.cuda_weights import load_weights  # noqa: E402

CPU = torch.device("cpu")
TOKENS = 7
NO_ATTENTION = Prefill((), (), *(torch.zeros(1, dtype=torch.int32),) * 2, None)


@pytest.fixture(scope="module", params=["v2-lite", "v2", "v3"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    folder: Path = tmp_path_factory.mktemp(request.param)
    write_random_checkpoint(folder / "checkpoint", preset_config(request.param))
    build_engine(folder / "checkpoint", folder / "engine", target="cuda", block_size=16)
    return read_program(folder / "engine" / "model.onnx")


def logits_of(program: Program, operators: dict) -> np.ndarray:
    model = CudaModel(program, load_weights(program, CPU), operators, CPU)
    names = {n for call in program.calls for n in call.inputs if n.startswith("kv_pool.")}
    width = 64 + 16
    lens = torch.tensor([0, TOKENS], dtype=torch.int32)
    positions = torch.arange(TOKENS, dtype=torch.int32)
    ids = torch.from_numpy(np.random.default_rng(3).integers(0, 4000, TOKENS).astype(np.int32))
    step = Step(
        ids,
        positions,
        positions + 5,
        None,
        Prefill((TOKENS,), (TOKENS,), lens, lens, None),
        {name: torch.zeros(2, 16, width) for name in names},
    )
    logits, _ = model.forward(step)
    return logits.numpy()


def test_fused_and_folded_calls_compute_the_same(program: Program) -> None:
    want = logits_of(program, REFERENCE)
    fused = fuse(program)
    np.testing.assert_allclose(logits_of(fused, FUSED_REFERENCE), want, atol=1e-5, rtol=1e-4)
    folded = fold_shared_experts(fused)
    np.testing.assert_allclose(logits_of(folded, FUSED_REFERENCE), want, atol=1e-5, rtol=1e-4)


def test_a_layer_is_few_calls(program: Program) -> None:
    fused = Counter(call.op for call in fuse(program).calls)
    assert fused["cuda.MoE"] == 3
    assert fused["deepseek.LatentAttention"] == 4
    for gone in ("deepseek.RMSNorm", "deepseek.Linear", "deepseek.SwiGLU", "Add", "Cast"):
        assert gone not in fused


def test_shared_experts_become_routed_ones(program: Program) -> None:
    folded = fold_shared_experts(fuse(program))
    moe = [call for call in folded.calls if call.op == "cuda.MoE"]
    assert all(call.attributes["num_shared"] in (1, 2) for call in moe)
    assert sum(isinstance(t, FoldedTensor) for t in folded.tensors.values()) == 2 * len(moe)
    assert not any("shared." in name for name in folded.tensors)


def test_what_something_else_reads_is_not_absorbed(program: Program) -> None:
    """A second reader of a norm keeps it."""
    norm = next(call for call in program.calls if call.op == "deepseek.RMSNorm")
    reader = next(call for call in program.calls if norm.outputs[0] in call.inputs)
    more = type(reader)("Identity", norm.outputs, ("logits2",), {})
    fused = fuse(program.with_calls([*program.calls, more]))
    assert sum(call.op == "deepseek.RMSNorm" for call in fused.calls) == 1


def residual_products(program: Program) -> list[Call]:
    return [c for c in fuse(program).calls if c.op == "cuda.Linear" and c.inputs[-1]]


def test_a_sum_takes_the_place_of_a_residual_that_nothing_else_reads(program: Program) -> None:
    products = residual_products(program)
    assert len(products) == 5  # after attention, and of the dense layer
    assert all(call.attributes["in_place"] for call in products)


@pytest.mark.parametrize("op", ["Identity", "cuda.Linear"])
def test_a_residual_that_is_read_later_or_through_a_view_stays(program: Program, op: str) -> None:
    call = residual_products(program)[-1]
    assert call.attributes["in_place"]
    residual = call.inputs[-1]
    reader = Call(op, (residual, *([""] * 4)), ("other",), call.attributes)
    at = 0 if op == "Identity" else len(program.calls)
    calls = list(program.calls)
    if op == "Identity":
        at = 1 + max(i for i, c in enumerate(calls) if residual in c.outputs)
    calls.insert(at, reader)
    calls.append(Call("Identity", ("other",), ("logits2",), {}))
    changed = [c for c in residual_products(program.with_calls(calls)) if c.inputs[-1] == residual]
    assert [c.attributes["in_place"] for c in changed] == [False]


def test_the_operator_adds_in_place_when_told_to() -> None:
    x, weight, residual = torch.randn(3, 8), torch.randn(5, 8), torch.randn(3, 5)
    want = residual + x @ weight.T
    attributes = {"epsilon": 0.0, "swiglu": False, "in_place": True}
    call = Call("cuda.Linear", (), (), attributes)
    step = Step(*(torch.zeros(3, dtype=torch.int32),) * 3, None, NO_ATTENTION, {})
    kept = fused_linear(
        step,
        replace(call, attributes={**attributes, "in_place": False}),
        [x, weight, None, None, residual],
    )
    torch.testing.assert_close(kept, want)
    assert not torch.equal(residual, want)
    got = fused_linear(step, call, [x, weight, None, None, residual])
    assert got is residual
    torch.testing.assert_close(got, want)


def test_rows_are_gathered_by_ids_of_either_width() -> None:
    data = torch.randn(6, 4)
    call = Call("Gather", (), (), {"axis": 0})
    step = Step(*(torch.zeros(3, dtype=torch.int32),) * 3, None, NO_ATTENTION, {})
    for dtype in (torch.int32, torch.int64):
        index = torch.tensor([5, 0, 5], dtype=dtype)
        assert torch.equal(gather(step, call, [data, index]), data[[5, 0, 5]])
    assert gather(step, call, [data, None]) is data
