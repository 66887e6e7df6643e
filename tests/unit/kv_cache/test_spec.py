from __future__ import annotations

from deepseek_triton.kv_cache.spec import KVCacheSpec


def test_a_block_takes_the_bytes_of_all_pools_and_layers() -> None:
    latent = KVCacheSpec(num_layers=3, width=576, block_size=16, itemsize=2)
    assert latent.bytes_per_block == 3 * 16 * 576 * 2
    grouped = KVCacheSpec(num_layers=3, width=576, block_size=16, itemsize=2, pools=("k", "v"))
    assert grouped.bytes_per_block == 2 * latent.bytes_per_block


def test_pools_are_named_layer_by_layer() -> None:
    assert KVCacheSpec(2, 8, 4).pool_names == ("kv_pool.0", "kv_pool.1")
    grouped = KVCacheSpec(2, 8, 4, pools=("k", "v"))
    assert grouped.pool_names == ("k_pool.0", "v_pool.0", "k_pool.1", "v_pool.1")
