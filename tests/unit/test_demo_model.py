"""The shipped demo model: whole, readable by this project and by transformers, and it completes."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.names import validate_checkpoint
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
LIMIT = 32_000_000  # bytes of all files together

sys.path.insert(0, str(ROOT / "build_scripts"))

PROMPT = 'class Point:\n    """A point in the plane."""\n\n    def __init__(self, x, y):\n'
COMPLETION = "        self.x = x\n        self.y = y\n\n    def __repr__(self):\n"


def test_every_file_has_its_checksum() -> None:
    lines = (DEMO / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    files = {path.name for path in DEMO.iterdir()} - {"SHA256SUMS"}
    assert set(sums) == files
    for name, digest in sums.items():
        assert hashlib.sha256((DEMO / name).read_bytes()).hexdigest() == digest, name
    assert sum((DEMO / name).stat().st_size for name in files) <= LIMIT


def test_the_checkpoint_is_complete_for_this_project() -> None:
    spec = read_model_spec(DEMO)
    assert (spec.architecture, spec.num_layers) == ("deepseek_v3", 9)
    assert spec.attention.q_lora_rank == 128
    assert spec.moe is not None and spec.moe.routing.kind == "sigmoid"
    assert spec.rope.interleaved
    validate_checkpoint(CheckpointReader(DEMO), spec)
    assert Tokenizer.load(DEMO).vocab_size == spec.vocab_size


def test_the_draft_layer_is_stored_as_deepseek_stores_it() -> None:
    reader = CheckpointReader(DEMO)
    layer = {name for name in reader.names() if name.startswith("model.layers.9.")}
    for name in ("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head.norm"):
        assert f"model.layers.9.{name}.weight" in layer
    copies = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
    for name, original in copies.items():
        copy = reader.read(f"model.layers.9.{name}.weight")
        assert np.array_equal(copy, reader.read(original))


def test_routers_learned_a_bias() -> None:
    reader = CheckpointReader(DEMO)
    for layer in range(1, 10):
        bias = reader.read(f"model.layers.{layer}.mlp.gate.e_score_correction_bias")
        assert bias.dtype == np.float32 and np.abs(bias).max() > 0.001, layer


def test_results_and_model_card_state_the_same_numbers() -> None:
    path = ROOT / "perf" / "results" / "demo_model_training.json"
    measured = json.loads(path.read_text(encoding="utf-8"))["measured"]
    evaluation = measured["evaluation"]
    card = (ROOT / "docs" / "demo-model.md").read_text(encoding="utf-8")
    assert f"{evaluation['held_out']['loss_nats_per_token']:.3f}" in card
    assert f"{evaluation['held_out']['bits_per_byte']:.3f}" in card
    for temperature in ("0", "0.2", "0.5", "0.8"):
        assert f"{evaluation[f'temperature_{temperature}']['accepted']:.1%}" in card
    assert evaluation["temperature_0"]["accepted"] >= 0.8
    assert PROMPT + COMPLETION in card


@pytest.fixture(scope="module")
def trained() -> Any:
    pytest.importorskip("torch")
    from training.export import from_checkpoint

    return from_checkpoint(DEMO)


def test_the_demo_completes_its_prompt(trained: Any) -> None:
    from training.evaluate import generate
    from training.judge import accepts

    tokenizer = Tokenizer.load(DEMO)
    count = len(tokenizer.encode(COMPLETION))
    (output,) = generate(trained, [tokenizer.encode(PROMPT)], count, temperature=0.0, seed=0)
    text = tokenizer.decode(output)
    assert text.startswith(COMPLETION)
    assert accepts(PROMPT, text, ended=False)


def test_transformers_computes_the_same(trained: Any) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reference = transformers.DeepseekV3ForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    ids = torch.tensor([Tokenizer.load(DEMO).encode(PROMPT + COMPLETION)])
    with torch.no_grad():
        expected = reference.eval()(ids).logits
        logits = trained.lm_head(trained.hidden(ids))
    assert (logits - expected).abs().max() < 1e-3
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
