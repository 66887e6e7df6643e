"""Each model-local function against its formula in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.checker
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper

from deepseek_triton.checkpoint.spec import RopeSpec
from deepseek_triton.export.functions import (
    DOMAIN,
    DOMAIN_VERSION,
    OPSET,
    function_library,
    functions_used,
)
from deepseek_triton.export.rope import quarter_turn

RNG = np.random.default_rng(0)
Array = NDArray[Any]


def call(function: str, *inputs: Array, **attributes: Any) -> list[Array]:
    """Run one call of a function on ONNX Runtime."""
    proto = function_library()[function]
    names = [f"in_{name}" for name in proto.input]
    node = helper.make_node(function, names, list(proto.output), domain=DOMAIN, **attributes)
    graph = helper.make_graph(
        [node],
        function,
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
            )
            for name, value in zip(names, inputs, strict=True)
        ],
        [onnx.ValueInfoProto(name=name) for name in proto.output],
    )
    model = helper.make_model(
        graph,
        functions=functions_used([node]),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)],
        ir_version=10,
    )
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, dict(zip(names, inputs, strict=True)))


def normal(*shape: int) -> NDArray[np.float32]:
    return RNG.normal(size=shape).astype(np.float32)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("name", sorted(function_library()))
def test_every_function_is_valid_and_documented(name: str) -> None:
    function = function_library()[name]
    onnx.checker.check_function(function)
    assert "→" in function.doc_string, "the comment above a function states its shapes"
    domains = {node.domain for node in function.node}
    assert domains <= {"", DOMAIN}


def test_linear_uses_the_checkpoint_layout() -> None:
    x, weight, bias = normal(3, 4), normal(5, 4), normal(5)
    np.testing.assert_allclose(call("Linear", x, weight)[0], x @ weight.T, rtol=1e-5, atol=1e-6)
    with_bias = call("LinearBias", x, weight, bias)[0]
    np.testing.assert_allclose(with_bias, x @ weight.T + bias, rtol=1e-5, atol=1e-6)


def test_swiglu_takes_gate_then_up() -> None:
    gate, up = normal(3, 4), normal(3, 4)
    got = call("SwiGLU", np.concatenate([gate, up], axis=1))[0]
    np.testing.assert_allclose(got, silu(gate) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_rms_norm(epsilon: float) -> None:
    x, weight = normal(2, 3, 8), normal(8)
    got = call("RMSNorm", x, weight, epsilon=epsilon)[0]
    want = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_rms_norm_of_zeros_is_zero() -> None:
    got = call("RMSNorm", np.zeros((2, 8), np.float32), normal(8), epsilon=1e-6)[0]
    np.testing.assert_array_equal(got, 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_squared_norm_is_a_float32_sum(dtype: type) -> None:
    x = (normal(5, 8) * 300).astype(dtype)
    got = call("SquaredNorm", x)[0]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got[:, 0], (x.astype(np.float64) ** 2).sum(-1), rtol=1e-5)


@pytest.mark.parametrize("value", [1e25, -1e25, np.inf, -np.inf, np.nan])
def test_squared_norm_is_not_finite_where_the_rms_norm_is_no_norm(value: float) -> None:
    x = normal(3, 8)
    x[1, 5] = value
    normed = call("RMSNorm", x, np.ones(8, np.float32), epsilon=1e-6)[0]
    assert not normed[1, :5].any() or np.isnan(normed[1, 5])
    assert np.isfinite(call("SquaredNorm", x)[0][:, 0]).tolist() == [True, False, True]


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_multiplies_complex_pairs(interleaved: bool) -> None:
    positions = np.array([[0, 5, 1000], [2, -1, 7]], np.int32)
    pair_frequencies = np.array([1.0, 0.1, 0.01], np.float32)
    expand = np.repeat if interleaved else np.tile
    cos, sin = call("RotaryAngles", positions, expand(pair_frequencies, 2), scale=1.25)
    x = normal(6, 2, 6)
    turn = quarter_turn(RopeSpec(6, 10000.0, interleaved))
    got = call("Rotary", x, cos, sin, turn)[0]

    def pairs(values: Array) -> Array:
        if interleaved:
            return values[..., 0::2] + 1j * values[..., 1::2]
        return values[..., :3] + 1j * values[..., 3:]

    angles = positions.reshape(6, 1, 1) * pair_frequencies
    np.testing.assert_allclose(pairs(got), pairs(x) * 1.25 * np.exp(1j * angles), atol=2e-4)


def test_attention_mask_shows_the_filled_slots_and_earlier_new_tokens() -> None:
    positions = np.array([[3, 4, 5], [0, -1, -1]], np.int32)
    context_lens = np.array([3, 0], np.int32)
    tables = np.zeros((2, 2), np.int32)
    mask = call("AttentionMask", positions, context_lens, tables, block_size=[2])[0]
    assert mask.shape == (2, 3, 1, 4 + 3)
    visible = (mask == 0).squeeze(2).astype(int)
    # Columns: four cached slots, then three new tokens.
    assert visible[0].tolist() == [
        [1, 1, 1, 0, 1, 0, 0],
        [1, 1, 1, 0, 1, 1, 0],
        [1, 1, 1, 0, 1, 1, 1],
    ]
    assert visible[1].tolist() == [[0, 0, 0, 0, 1, 0, 0], [0] * 7, [0] * 7]
    assert np.isfinite(mask).all()


@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (3, 3), (4, 1)])
def test_grouped_query_attention_equals_attention_head_by_head(heads: int, groups: int) -> None:
    """Two rows: five cached tokens and two new ones; nothing cached, one new token, padding."""
    dim, block, scale = 4, 4, 0.4
    positions = np.array([[5, 6], [0, -1]], np.int32)
    context_lens, tables = np.array([5, 0], np.int32), np.array([[2, 0], [1, 1]], np.int32)
    cos, sin = call("RotaryAngles", positions, np.array([1.0, 0.1] * 2, np.float32), scale=1.0)
    rotary = (cos, sin, quarter_turn(RopeSpec(dim, 10000.0, False)))
    q, k, v = normal(4, heads * dim), normal(4, groups * dim), normal(4, groups * dim)
    k_pool, v_pool = normal(3, block, groups * dim), normal(3, block, groups * dim)
    mask = call("AttentionMask", positions, context_lens, tables, block_size=[block])[0]
    o, new_k, new_v = call(
        "GroupedQueryAttention",
        *(q, k, v, *rotary, k_pool, v_pool, tables, mask),
        num_heads=[heads],
        num_kv_heads=[groups],
        head_dim=[dim],
        scale=scale,
        rotary_interleaved=[0],
    )
    k_rotated = call("Rotary", k.reshape(4, groups, dim), *rotary)[0]
    q_rotated = call("Rotary", q.reshape(4, heads, dim), *rotary)[0]
    np.testing.assert_allclose(new_k.reshape(4, groups, dim), k_rotated, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(new_v.reshape(4, -1), v)

    def cached(pool: Array, new: Array, token: int) -> Array:
        rows = [*pool[tables[0]].reshape(-1, groups * dim)[:5]] if token < 2 else []
        rows += [*new.reshape(4, -1)[: token + 1]] if token < 2 else [new.reshape(4, -1)[2]]
        return np.stack(rows).reshape(-1, groups, dim)

    for token in (0, 1, 2):  # the fourth is padding
        keys, values = cached(k_pool, k_rotated, token), cached(v_pool, v, token)
        for head in range(heads):
            group = head * groups // heads
            weights = softmax(keys[:, group] @ q_rotated[token, head] * scale)
            got = o[token].reshape(heads, dim)[head]
            np.testing.assert_allclose(got, weights @ values[:, group], rtol=1e-4, atol=1e-5)
    assert np.isfinite(o).all(), "a padding row made a NaN"


def latent_attention_inputs() -> dict[str, Array]:
    """Two rows: five cached tokens and two new ones; nothing cached, one new token, padding."""
    heads, nope, rope, rank, value, block = 3, 4, 2, 5, 6, 4
    positions = np.array([[5, 6], [0, -1]], np.int32)
    context_lens, tables = np.array([5, 0], np.int32), np.array([[2, 0], [1, 1]], np.int32)
    angles = [positions, np.array([1.0, 1.0], np.float32)]
    cos, sin = call("RotaryAngles", *angles, scale=1.0)
    return {
        "q": normal(4, heads * (nope + rope)),
        "kv_a": normal(4, rank + rope),
        "kv_norm": normal(rank),
        "w_uk": normal(heads, nope, rank),
        "w_uv": normal(heads, rank, value),
        "cos": cos,
        "sin": sin,
        "turn": quarter_turn(RopeSpec(rope, 10000.0, True)),
        "kv_pool": normal(3, block, rank + rope),
        "block_tables": tables,
        "mask": call("AttentionMask", positions, context_lens, tables, block_size=[block])[0],
    }


def test_latent_attention_equals_attention_over_expanded_keys_and_values() -> None:
    inputs = latent_attention_inputs()
    heads, nope, rank = inputs["w_uk"].shape
    rope, scale = inputs["turn"].shape[0], 0.4
    o, new_kv = call(
        "LatentAttention",
        *inputs.values(),
        num_heads=[heads],
        qk_head_dims=[nope, rope],
        latent_dims=[rank, rope],
        v_head_dim=[6],
        scale=scale,
        epsilon=1e-6,
        rotary_interleaved=[1],
    )
    rotary = [inputs[name] for name in ("cos", "sin", "turn")]
    q = inputs["q"].reshape(4, heads, nope + rope)
    q_rope = call("Rotary", q[..., nope:], *rotary)[0]
    latent = call("RMSNorm", inputs["kv_a"][:, :rank], inputs["kv_norm"], epsilon=1e-6)[0]
    k_rope = call("Rotary", inputs["kv_a"][:, None, rank:], *rotary)[0][:, 0]
    rows = np.concatenate([latent, k_rope], axis=1)
    np.testing.assert_allclose(new_kv.reshape(4, -1), rows, rtol=1e-5, atol=1e-6)

    pool, table = inputs["kv_pool"], inputs["block_tables"]
    cached = np.concatenate([pool[table[0, 0]], pool[table[0, 1]]])[:5]
    for token, keys in [(0, [*cached, rows[0]]), (1, [*cached, *rows[:2]]), (2, [rows[2]])]:
        kv = np.stack(keys)
        for head in range(heads):
            k_nope = kv[:, :rank] @ inputs["w_uk"][head].T
            values = kv[:, :rank] @ inputs["w_uv"][head]
            scores = k_nope @ q[token, head, :nope] + kv[:, rank:] @ q_rope[token, head]
            want = softmax(scores * scale) @ values
            got = o[token].reshape(heads, -1)[head]
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert np.isfinite(o).all(), "a padding row made a NaN"
