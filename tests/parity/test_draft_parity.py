"""The draft model against a decoder layer of transformers, with the demo model's weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
)

from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.export.portable import DRAFT_FILE, export_portable

pytestmark = pytest.mark.parity

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
LAYER = 9
TOLERANCE = 1e-4


def weights_of_layer() -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in DEMO.glob("*.safetensors"):
        tensors |= load_file(path)
    prefix = f"model.layers.{LAYER}."
    return {k.removeprefix(prefix): v.float() for k, v in tensors.items() if k.startswith(prefix)}


@torch.inference_mode()
def reference(ids: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states [n, D] before the final norm, and the logits [V] of the draft at the end."""
    model = AutoModelForCausalLM.from_pretrained(
        DEMO, dtype=torch.float32, attn_implementation="eager"
    )
    weights, config = weights_of_layer(), model.config
    layer = DeepseekV3DecoderLayer(config, config.num_hidden_layers).eval()
    experts = config.n_routed_experts
    own = {k: v for k, v in weights.items() if k in layer.state_dict()}
    gates = [weights[f"mlp.experts.{e}.gate_proj.weight"] for e in range(experts)]
    ups = [weights[f"mlp.experts.{e}.up_proj.weight"] for e in range(experts)]
    downs = [weights[f"mlp.experts.{e}.down_proj.weight"] for e in range(experts)]
    own["mlp.experts.gate_up_proj"] = torch.stack(
        [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
    )
    own["mlp.experts.down_proj"] = torch.stack(downs)
    layer.load_state_dict(own)

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        module = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        module.weight.copy_(weights[name])
        return module(x)

    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    normed = model.model(ids[None, :-1]).last_hidden_state
    embedded = model.model.embed_tokens(ids[None, 1:])
    joined = torch.cat([norm("enorm.weight", embedded), norm("hnorm.weight", normed)], dim=-1)
    x = joined @ weights["eh_proj.weight"].T
    positions = torch.arange(x.shape[1])[None]
    mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
    out = layer(
        x,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=model.model.rotary_emb(x, positions),
    )
    out = out[0] if isinstance(out, tuple) else out
    logits = model.lm_head(norm("shared_head.norm.weight", out[:, -1]))
    return before_norm[0][0].numpy(), logits[0].numpy()


def test_draft_logits_equal_the_reference(tmp_path: Path) -> None:
    export_portable(
        read_model_spec(DEMO), CheckpointReader(DEMO), tmp_path / "out", block_size=4, draft=True
    )
    ids = np.random.default_rng(0).integers(3, 4000, 23)
    hidden, expected = reference(torch.tensor(ids))
    count = len(ids) - 1
    session = onnxruntime.InferenceSession(tmp_path / "out" / DRAFT_FILE)
    width = session.get_inputs()[-1].shape[-1]
    logits = session.run(
        ["logits"],
        {
            "input_ids": ids[None, 1:].astype(np.int32),
            "hidden": hidden,
            "positions": np.arange(count, dtype=np.int32)[None],
            "context_lens": np.zeros(1, np.int32),
            "block_tables": np.zeros((1, 1), np.int32),
            "last_token": np.array([count - 1], np.int32),
            f"kv_pool.{LAYER}": np.zeros((1, 4, width), np.float32),
        },
    )[0]
    np.testing.assert_allclose(logits[0], expected, atol=TOLERANCE, rtol=0)
