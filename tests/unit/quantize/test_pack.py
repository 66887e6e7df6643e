"""The writer against the layout, read bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from deepseek_triton.quantize.int4 import Int4Weight, unpack_words
from deepseek_triton.quantize.pack import (
    pack_words,
    packed_nbytes,
    packed_tensors,
    quantization_config,
)

RNG = np.random.default_rng(0)
HALF = np.dtype(np.float16)


@pytest.mark.parametrize("shape", [(3, 8), (5, 20), (16, 128)])
def test_the_lowest_bits_of_a_word_hold_the_first_code(shape: tuple[int, int]) -> None:
    codes = RNG.integers(0, 16, shape).astype(np.uint8)
    words = pack_words(codes)
    assert words.dtype == np.int32 and words.shape == (shape[0], -(-shape[1] // 8))
    for n in range(shape[0]):
        for k in range(shape[1]):
            assert (int(words[n, k // 8]) >> (4 * (k % 8))) & 15 == codes[n, k]
    np.testing.assert_array_equal(unpack_words(words)[:, : shape[1]], codes)


def test_zero_points_are_packed_along_the_rows() -> None:
    codes = RNG.integers(0, 16, (10, 64)).astype(np.uint8)
    zeros = RNG.integers(0, 16, (10, 4)).astype(np.uint8)
    scales = RNG.random((10, 4)).astype(np.float16).astype(np.float32)
    tensors = packed_tensors("m", Int4Weight(codes, scales, zeros, 16), HALF)
    packed = tensors["m.weight_zero_point"]
    assert packed.shape == (2, 4)
    for n in range(10):
        for g in range(4):
            assert (int(packed[n // 8, g]) >> (4 * (n % 8))) & 15 == zeros[n, g]
    assert tensors["m.weight_scale"].dtype == HALF
    np.testing.assert_array_equal(tensors["m.weight_scale"].astype(np.float32), scales)
    assert tensors["m.weight_shape"].tolist() == [10, 64]


def test_symmetric_weights_have_no_zero_points() -> None:
    weight = Int4Weight(np.zeros((2, 16), np.uint8), np.ones((2, 1), np.float32), None, 16)
    assert set(packed_tensors("m", weight, HALF)) == {
        *("m.weight_packed", "m.weight_scale", "m.weight_shape")
    }
    config = quantization_config(16, symmetric=True, ignore=["lm_head"])
    assert config["config_groups"]["group_0"]["weights"]["symmetric"] is True
    assert (config["format"], config["ignore"]) == ("pack-quantized", ["lm_head"])


@pytest.mark.parametrize("shape", [(10, 64), (16, 128), (3, 32)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_bytes_are_known_before_the_tensors(shape: tuple[int, int], symmetric: bool) -> None:
    codes = RNG.integers(0, 16, shape).astype(np.uint8)
    groups = (shape[0], shape[1] // 16)
    zeros = None if symmetric else np.zeros(groups, np.uint8)
    weight = Int4Weight(codes, np.ones(groups, np.float32), zeros, 16)
    tensors = packed_tensors("m", weight, HALF)
    assert packed_nbytes(shape, 16, symmetric=symmetric, scale_itemsize=2) == sum(
        tensor.nbytes for tensor in tensors.values()
    )
