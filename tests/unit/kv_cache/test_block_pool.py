import pytest

from deepseek_triton.kv_cache.block_pool import BlockPool


def test_hands_out_each_block_once():
    pool = BlockPool(5)
    taken = [*pool.allocate(2), *pool.allocate(3)]
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used, pool.num_blocks) == (0, 5, 5)


def test_takes_nothing_when_too_few_are_free():
    pool = BlockPool(3)
    held = pool.allocate(2)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.check_integrity([held])


def test_zero_blocks_are_always_available():
    pool = BlockPool(1)
    pool.allocate(1)
    assert pool.allocate(0) == []


def test_freed_blocks_are_taken_again():
    pool = BlockPool(2)
    first = pool.allocate(2)
    pool.free(first)
    assert sorted(pool.allocate(2)) == sorted(first)


def test_a_shared_block_is_free_only_after_its_last_holder():
    pool = BlockPool(2)
    held = pool.allocate(1)
    pool.retain(held)
    pool.check_integrity([held, held])
    pool.free(held)
    assert pool.num_free == 1
    pool.free(held)
    assert pool.num_free == 2
    pool.check_integrity([])


@pytest.mark.parametrize("misuse", ["free", "retain"])
def test_a_free_block_has_no_holder_to_change(misuse):
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="block 1 is free"):
        getattr(pool, misuse)([1])
    pool.check_integrity([])


def test_integrity_check_finds_a_lost_and_a_doubly_held_block():
    pool = BlockPool(3)
    held = pool.allocate(2)
    with pytest.raises(AssertionError, match="block tables say"):
        pool.check_integrity([held[:1]])
    with pytest.raises(AssertionError, match="block tables say"):
        pool.check_integrity([held, held[:1]])


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)
