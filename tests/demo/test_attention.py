"""The reference attention of the demo against the formula."""

import ml_dtypes
import numpy as np
import pytest
from attention import ReferenceAttention


def random_bf16(rng, *shape):
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("accumulate", [np.float32, np.float64])
def test_equals_the_formula_while_tokens_are_appended(accumulate):
    rng = np.random.default_rng(5)
    layers, tokens, query_heads, kv_heads, head_dim, steps = 2, 37, 9, 3, 64, 300
    keys = [random_bf16(rng, tokens, kv_heads, head_dim) for _ in range(layers)]
    values = [random_bf16(rng, tokens, kv_heads, head_dim) for _ in range(layers)]
    attention = ReferenceAttention(keys, values, accumulate)
    for _ in range(steps):  # More than the room of one growth.
        for layer in range(layers):
            q = random_bf16(rng, query_heads, head_dim)
            k, v = random_bf16(rng, 2, kv_heads, head_dim)
            out = attention(layer, q, k, v)
            keys[layer] = np.concatenate([keys[layer], k[np.newaxis]])
            values[layer] = np.concatenate([values[layer], v[np.newaxis]])
    assert out.dtype == np.float32
    assert attention.kv_bytes == sum(stored.nbytes for stored in keys + values)
    for head in range(query_heads):
        head_k, head_v = (
            stored[-1][:, head // 3].astype(np.float64) for stored in (keys, values)
        )
        logits = head_k @ q[head].astype(np.float64) / 8
        weights = np.exp(logits - logits.max())
        np.testing.assert_allclose(out[head], weights @ head_v / weights.sum(), atol=2e-6)


def test_does_not_change_what_it_was_given():
    rng = np.random.default_rng(6)
    k, v = random_bf16(rng, 2, 4, 1, 16)
    before = k.copy(), v.copy()
    attention = ReferenceAttention([k], [v])
    attention(0, random_bf16(rng, 2, 16), *random_bf16(rng, 2, 1, 16))
    assert (k == before[0]).all() and (v == before[1]).all()
