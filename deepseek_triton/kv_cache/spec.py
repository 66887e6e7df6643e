"""Geometry of the paged KV cache: shared by export, build, runner and scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVCacheSpec:
    """The pools of each layer, every one a float array [num_blocks, block_size, width].

    In a graph, pool p of layer l is the input `<p>_pool.<l>`, its new rows are `new_<p>.<l>`.
    """

    num_layers: int
    width: int  # latent attention: kv_lora_rank + qk_rope_head_dim; else num_kv_heads · head_dim
    block_size: int  # tokens in a block
    dtype: str = "float32"  # a NumPy or ml_dtypes name
    itemsize: int = 4  # bytes an element
    pools: tuple[str, ...] = ("kv",)  # of a layer; grouped-query attention: ("k", "v")

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers and pools."""
        return len(self.pools) * self.num_layers * self.block_size * self.width * self.itemsize

    @property
    def pool_names(self) -> tuple[str, ...]:
        """Names of all pools as graph inputs, layer by layer."""
        return tuple(f"{p}_pool.{layer}" for layer in range(self.num_layers) for p in self.pools)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
