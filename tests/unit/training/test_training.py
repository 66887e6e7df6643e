"""The demo model's training code, at toy size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "build_scripts"))

from training.config import DemoConfig  # noqa: E402
from training.data import BEGIN, Windows  # noqa: E402
from training.export import from_checkpoint, to_checkpoint, write_checkpoint  # noqa: E402
from training.loop import TrainOptions, load_trained, train  # noqa: E402
from training.model import DemoModel, MoE  # noqa: E402
from training.optim import orthogonalise  # noqa: E402
from training.shards import compress  # noqa: E402

TOY = DemoConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=48,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    max_position_embeddings=32,
)
OPTIONS = TrainOptions(steps=6, batch=2, length=32, warmup=2, device="cpu", config=TOY)


def documents(count: int = 200) -> np.ndarray:
    rng = np.random.default_rng(3)
    parts = [[BEGIN, *rng.integers(2, 64, rng.integers(3, 20)), 1] for _ in range(count)]
    return np.concatenate(parts).astype(np.uint16)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.xz").write_bytes(compress(documents()))
    return tmp_path


def losses(curve: list[dict[str, float]]) -> list[float]:
    return [entry["loss"] for entry in curve if "loss" in entry]


def test_a_resumed_training_equals_an_uninterrupted_one(corpus: Path) -> None:
    whole, halves = corpus / "whole.pt", corpus / "halves.pt"
    train(corpus, whole, OPTIONS, minutes=1.0)
    train(corpus, halves, OPTIONS, minutes=0.0)  # one step, then out of time
    assert load_trained(halves)[1]["step"] == 1
    train(corpus, halves, OPTIONS, minutes=1.0)
    assert load_trained(halves)[1]["step"] == OPTIONS.steps
    expected, found = load_trained(whole)[0].state_dict(), load_trained(halves)[0].state_dict()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def test_a_state_of_other_options_is_refused(corpus: Path) -> None:
    state = corpus / "state.pt"
    train(corpus, state, OPTIONS, minutes=0.0)
    with pytest.raises(SystemExit, match="other options"):
        train(corpus, state, TrainOptions(**{**vars(OPTIONS), "seed": 1}), minutes=0.0)


def test_an_exported_model_is_the_trained_one_in_bfloat16(tmp_path: Path) -> None:
    model = DemoModel(TOY)
    for router in model.routers():
        torch.nn.init.normal_(router.e_score_correction_bias)
    (tmp_path / "tokenizer.json").write_text("{}")
    write_checkpoint(model, tmp_path / "tokenizer.json", tmp_path / "out")
    loaded = from_checkpoint(tmp_path / "out")
    for name, value in model.state_dict().items():
        exact = name.endswith("correction_bias")
        expected = value if exact else value.bfloat16().float()
        assert torch.equal(loaded.state_dict()[name], expected), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert DemoConfig.from_json(config) == TOY


def test_the_exported_tensors_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**TOY.to_json()))
    reference.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    expected = {
        name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()
    }
    found = {name: tuple(t.shape) for name, t in to_checkpoint(DemoModel(TOY)).items()}
    extra = f"model.layers.{TOY.num_hidden_layers}."
    assert {n: s for n, s in found.items() if not n.startswith(extra)} == expected


def test_each_token_gets_its_share_of_experts_and_the_bias_only_steers() -> None:
    torch.manual_seed(0)
    layer = MoE(TOY)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(50, TOY.hidden_size)
    layer.gate.e_score_correction_bias[2] = 100.0
    gates = layer.gate(x)
    assert ((gates > 0).sum(-1) == TOY.num_experts_per_tok).all()
    assert (gates[:, 2] > 0).all()
    assert torch.allclose(gates.sum(-1), torch.full((50,), TOY.routed_scaling_factor))
    scores = (x @ layer.gate.weight.T).sigmoid()
    share = gates / TOY.routed_scaling_factor
    chosen = scores * (gates > 0)
    assert torch.allclose(share, chosen / chosen.sum(-1, keepdim=True), atol=1e-6)


def test_an_idle_expert_gains_bias_and_a_busy_one_loses_it() -> None:
    router = MoE(TOY).gate
    router.load = torch.tensor([10.0, 0.0, 5.0, 5.0])
    router.update_bias(0.25)
    assert router.e_score_correction_bias.tolist() == [-0.25, 0.25, 0.0, 0.0]
    assert router.load.sum() == 0


def test_orthogonalised_updates_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    update = orthogonalise(torch.randn(3, 24, 16))
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.5 and values.max() < 1.5


def test_the_second_loss_is_about_the_token_after_the_next() -> None:
    torch.manual_seed(0)
    model = DemoModel(TOY).eval()
    window = torch.randint(0, 64, (1, 12))
    changed = window.clone()
    changed[0, -1] = (window[0, -1] + 1) % 64
    with torch.no_grad():
        before, after = model.losses(window), model.losses(changed)
    assert before[0] == after[0]  # the last token is no target of the first loss
    assert before[1] != after[1]


def test_windows_are_reproducible_and_mostly_begin_with_a_document() -> None:
    tokens = documents(5000)
    make: Any = lambda seed: Windows(tokens, 34, seed)  # noqa: E731
    windows = make(0)
    batches = [windows.batch(step, 4) for step in range(windows.per_epoch // 4)]
    assert np.array_equal(batches[7], make(0).batch(7, 4))
    assert not np.array_equal(batches[7], make(1).batch(7, 4))
    rows = np.concatenate(batches)
    assert rows.shape[1] == 34
    assert (rows[:, 0] == BEGIN).mean() > 0.99
    assert len({row.tobytes() for row in rows}) > 0.99 * len(rows)
