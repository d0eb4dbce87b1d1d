"""What the daemon computes, in float64 with numpy: the projection, projected keys, scores, attention, merging."""

import math

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)


def round_to_bf16(x):
    """float64 to BF16, to nearest even, in one rounding (astype goes by way of float32)."""
    bits = np.ascontiguousarray(x, np.float64).view(np.uint64)
    dropped = np.uint64(52 - 7)
    odd = (bits >> dropped) & np.uint64(1)
    bits = bits + (np.uint64((1 << 44) - 1) + odd)
    return ((bits >> dropped) << dropped).view(np.float64).astype(BF16)


def _philox(counter, key):
    """Philox4x32-10 of Salmon et al. 2011 on arrays of counters, [n, 4] uint32 in uint64."""
    mask = np.uint64(0xFFFFFFFF)
    c = [counter[:, i].astype(np.uint64) for i in range(4)]
    k0, k1 = key
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * c[0]
        p1 = np.uint64(0xCD9E8D57) * c[2]
        c = [
            (p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            p1 & mask,
            (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            p0 & mask,
        ]
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, 1)


def gaussian_projection(seed, head_dim, rank):
    """P, [head_dim, rank] BF16, version 1."""
    pairs = np.arange((head_dim * rank + 1) // 2, dtype=np.uint64)
    counter = np.zeros((pairs.size, 4), np.uint64)
    counter[:, 0] = pairs & np.uint64(0xFFFFFFFF)
    counter[:, 1] = pairs >> np.uint64(32)
    counter[:, 3] = 1
    w = _philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    shift = np.uint64(32)
    u1 = ((((w[:, 0] << shift) + w[:, 1]) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    u2 = ((((w[:, 2] << shift) + w[:, 3]) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    radius = np.sqrt(-2 * np.log(u1))
    z = np.stack([radius * np.cos(2 * np.pi * u2), radius * np.sin(2 * np.pi * u2)], 1).ravel()
    return round_to_bf16(z[: head_dim * rank] / math.sqrt(rank)).reshape(head_dim, rank)


def bf16_ulp(x):
    """The distance between BF16 numbers at x."""
    x = np.abs(np.asarray(x, np.float64))
    return 2.0 ** (np.floor(np.log2(np.maximum(x, 2.0**-126))) - 7)


def project(k, projection):
    """A_g in float64: k [n, block_tokens, num_kv_heads, head_dim] to [n, num_kv_heads, block_tokens, rank]."""
    return np.einsum("nthd,dr->nhtr", k.astype(np.float64), projection.astype(np.float64))


def score(q, projected_keys, projection, valid_tokens, mass, scale=None):
    """A score per block: q [num_query_heads, head_dim], projected_keys [n, num_kv_heads, block_tokens, rank]."""
    num_query_heads, head_dim = q.shape
    n, num_kv_heads, block_tokens, _ = projected_keys.shape
    q = q.astype(np.float64) @ projection.astype(np.float64)
    q = q.reshape(num_kv_heads, num_query_heads // num_kv_heads, -1)
    dots = np.einsum("hgr,nhtr->nhgt", q, projected_keys.astype(np.float64))
    valid = np.arange(block_tokens) < np.asarray(valid_tokens)[:, None]
    dots = np.where(valid[:, None, None, :], dots, -np.inf)
    if not mass:
        return dots.max(axis=(1, 2, 3))
    logits = dots * (1 / math.sqrt(head_dim) if scale is None else scale)
    weights = np.exp(logits - logits.max(axis=(0, 3), keepdims=True))
    shares = weights.sum(axis=3) / weights.sum(axis=(0, 3))
    return shares.mean(axis=(1, 2))


def attend(q, k, v, *, scale=None, logit_softcap=0.0, window_tokens=0, sink_tokens=0, sink_logits=(), causal=True):
    """Attention of q [query_tokens, num_query_heads, head_dim], the last positions of k and v [context_tokens,
    num_kv_heads, head_dim]. Returns out, likewise, and lse [query_tokens, num_query_heads]."""
    query_tokens, num_query_heads, head_dim = q.shape
    context_tokens, num_kv_heads, _ = k.shape
    group = num_query_heads // num_kv_heads
    q = q.astype(np.float64).reshape(query_tokens, num_kv_heads, group, head_dim)
    logits = np.einsum("ihgd,thd->ihgt", q, k.astype(np.float64))
    logits = logits.reshape(query_tokens, num_query_heads, context_tokens)
    logits *= 1 / math.sqrt(head_dim) if scale is None else scale
    if logit_softcap:
        logits = logit_softcap * np.tanh(logits / logit_softcap)
    positions = np.arange(context_tokens)
    seen = np.ones((query_tokens, context_tokens), bool)
    if causal:
        own = (context_tokens - query_tokens + np.arange(query_tokens))[:, None]
        seen = positions <= own
        if window_tokens:
            seen &= (positions > own - window_tokens) | (positions < sink_tokens)
    logits = np.where(seen[:, None, :], logits, -np.inf)
    extra = np.full((query_tokens, num_query_heads, 1), -np.inf)
    if len(sink_logits):
        extra[:] = np.asarray(sink_logits, np.float64)[None, :, None]
    everything = np.concatenate([logits, extra], 2)
    m = everything.max(axis=2, keepdims=True)
    weights = np.exp(everything - m)
    l = weights.sum(axis=2, keepdims=True)  # noqa: E741
    shares = (weights / l)[:, :, :-1].reshape(query_tokens, num_kv_heads, group, context_tokens)
    out = np.einsum("ihgt,thd->ihgd", shares, v.astype(np.float64))
    return out.reshape(query_tokens, num_query_heads, head_dim), (m + np.log(l))[:, :, 0]


def merge(parts):
    """Parts (out, lse) of one context, each over other tokens, as one."""
    outs, lses = (np.stack([np.asarray(x, np.float64) for x in xs]) for xs in zip(*parts))
    m = lses.max(axis=0)
    weights = np.exp(lses - m)
    return (weights[..., None] * outs).sum(0) / weights.sum(0)[..., None], m + np.log(weights.sum(0))


def assert_close(out, expected):
    """The promise: within 2 BF16 ulp or 1e-3 of the float64 result, whichever is larger."""
    error = np.abs(np.asarray(out, np.float64) - expected)
    allowed = np.maximum(2 * bf16_ulp(expected), 1e-3)
    worst = np.unravel_index(np.argmax(error - allowed), error.shape)
    assert (error <= allowed).all(), f"at {worst}: {float(out[worst])} instead of {expected[worst]}"
