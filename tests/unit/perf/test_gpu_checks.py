"""What can be said without a GPU of the checks that need one: they replace what is there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

PERF = Path(__file__).resolve().parents[3] / "perf"


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PERF))
    monkeypatch.syspath_prepend(str(PERF / "gpu"))
    monkeypatch.setattr(sys, "argv", ["check"])


def test_the_names_that_checks_replace_exist() -> None:
    import bench_gpu
    import checks

    choices = checks.Choices()
    with choices.recording(), choices.following(), bench_gpu.only_timed:
        assert checks.cuda_kernels.choose_experts == choices.record
        assert checks.cuda_fused_reference.route == choices.follow
        assert checks.cuda_graphs.PROMPT_BUCKETS == ((bench_gpu.CONTEXT, 16),)


def test_every_kernel_case_can_be_listed() -> None:
    import attention_decode_cases
    import attention_prefill_cases
    import linear_check_cases

    assert len(list(linear_check_cases.all_cases(sweep=True))) > 50
    assert attention_decode_cases and attention_prefill_cases


@pytest.mark.parametrize(
    "name", ["V2_LITE", "V3_LAYER", "DISTILL_LLAMA_8B", "DISTILL_QWEN_7B", "MOE_16B"]
)
def test_programs_of_random_weights_can_be_made(name: str) -> None:
    import random_model

    config = getattr(random_model, name)
    spec = random_model.make_spec(config, num_hidden_layers=2)
    program = random_model.make_program(spec, "bf16", 64)
    int4 = random_model.quantized(program, 128)

    embedding = program.tensors["embedding.weight"]
    assert embedding.shape == (config["vocab_size"], config["hidden_size"])
    codes = [t for name, t in int4.tensors.items() if name.endswith(".codes")]
    assert codes and all(t.onnx_type == 21 for t in codes)  # UINT4
    assert len(int4.calls) >= len(program.calls)


def test_a_random_engine_is_an_engine(tmp_path: Path) -> None:
    import random_engine
    import random_model

    from deepseek_triton.build.engine_dir import load_engine_dir

    small = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    spec = random_model.make_spec(random_model.V2_LITE, vocab_size=1024, **small, **experts)
    random_engine.write_random_engine(tmp_path / "engine", spec)

    loaded = load_engine_dir(tmp_path / "engine")  # checks every file against the manifest
    assert (loaded.manifest.target, loaded.manifest.model) == ("cuda", spec)
