"""Tiny model specs and readers that need no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.checkpoint.names import expected_tensors
from deepseek_triton.checkpoint.reader import Block, row_blocks
from deepseek_triton.checkpoint.spec import (
    LatentAttentionSpec,
    ModelSpec,
    MoESpec,
    RopeSpec,
    RoutingSpec,
)
from deepseek_triton.errors import CheckpointError


def tiny_spec(**changes: Any) -> ModelSpec:
    """Return a two-layer model, the second layer with experts; `changes` replace its fields."""
    fields: dict[str, Any] = {
        "architecture": "deepseek_v2",
        "vocab_size": 40,
        "hidden_size": 16,
        "num_layers": 2,
        "intermediate_size": 24,
        "moe_layers": (1,),
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "attention": LatentAttentionSpec(
            num_heads=2,
            q_lora_rank=None,
            kv_lora_rank=12,
            qk_nope_head_dim=6,
            qk_rope_head_dim=4,
            v_head_dim=5,
            softmax_scale=0.3,
        ),
        "rope": RopeSpec(dim=4, theta=10000.0, interleaved=True),
        "moe": MoESpec(RoutingSpec("softmax", 4, 2, 1, 1, 1.0, False), 8, 16),
        "bos_token_id": 0,
        "eos_token_ids": (1,),
    }
    return ModelSpec(**(fields | changes))


class DictReader:
    """A reader over random arrays of every tensor that `spec` names."""

    def __init__(self, spec: ModelSpec, dtype: Any = np.float32) -> None:
        rng = np.random.default_rng(0)
        self.arrays: dict[str, NDArray[Any]] = {
            name: rng.normal(size=shape).astype(dtype) for name, shape in expected_tensors(spec)
        }

    def require(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        if name not in self.arrays or self.arrays[name].shape != shape:
            raise CheckpointError(f"tensor {name} is missing or misshapen")
        return self.arrays[name]

    def blocks(self, name: str, shape: tuple[int, ...]) -> Iterator[Block]:
        yield from row_blocks(self.require(name, shape))

    def int4(self, source: str) -> None:
        """No layer is INT4."""

    def release(self) -> None:
        """Nothing is mapped."""
