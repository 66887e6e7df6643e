"""Geometry of the paged KV cache: shared by export, build, runner and scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVCacheSpec:
    """One pool a layer, each float array [num_blocks, block_size, width]."""

    num_layers: int
    width: int  # latent attention: kv_lora_rank + qk_rope_head_dim
    block_size: int  # tokens in a block
    dtype: str = "float32"  # a NumPy or ml_dtypes name
    itemsize: int = 4  # bytes an element

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers."""
        return self.num_layers * self.block_size * self.width * self.itemsize

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
