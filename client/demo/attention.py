"""Decode attention in this process, the reference that the demo holds a daemon's attention against.

    attention = ReferenceAttention(prefill.keys, prefill.values)
    out = attention(layer, q, k, v)  # appends k and v, then attends

Keys and values are kept in BF16; logits, softmax weights and sums are float32, or float64 on
request. The formula is plain softmax(q k^T / sqrt(head_dim)) v with grouped query heads: query
head h reads kv head h // (num_query_heads // num_kv_heads).

Threads: one at a time.
"""

from typing import Sequence

import ml_dtypes
import numpy as np

# Tokens of room that are added when a layer is full.
_GROW_TOKENS = 256


class ReferenceAttention:
    """Holds every layer's keys and values and attends to all of a layer's tokens."""

    def __init__(
        self,
        keys: Sequence[np.ndarray],
        values: Sequence[np.ndarray],
        accumulate: type = np.float32,
    ):
        """Copies `keys` and `values`, one BF16 [tokens, num_kv_heads, head_dim] per layer."""
        self._accumulate = accumulate
        self._tokens = [len(layer_keys) for layer_keys in keys]
        self._stored = [
            _with_room(np.stack([k, v])) for k, v in zip(keys, values, strict=True)
        ]

    def __call__(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """q [num_query_heads, head_dim], k and v [num_kv_heads, head_dim], BF16; float32 out."""
        self._append(layer, k, v)
        k, v = _widen(self._stored[layer][:, : self._tokens[layer]], self._accumulate)
        _, num_kv_heads, head_dim = k.shape
        q = q.astype(self._accumulate).reshape(num_kv_heads, -1, head_dim)
        out = np.empty_like(q)
        for head in range(num_kv_heads):
            logits = (q[head] @ k[:, head].T) * self._accumulate(head_dim**-0.5)
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            out[head] = (weights @ v[:, head]) / weights.sum(axis=-1, keepdims=True)
        return out.reshape(-1, head_dim).astype(np.float32)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values held, room for more not counted."""
        return sum(
            stored[:, :tokens].nbytes for stored, tokens in zip(self._stored, self._tokens)
        )

    def _append(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        position = self._tokens[layer]
        if position == self._stored[layer].shape[1]:
            self._stored[layer] = _with_room(self._stored[layer])
        self._stored[layer][0, position] = k
        self._stored[layer][1, position] = v
        self._tokens[layer] = position + 1


def _with_room(stored: np.ndarray) -> np.ndarray:
    """A copy of [K or V, tokens, ...] with room for more tokens."""
    room = np.zeros((2, _GROW_TOKENS, *stored.shape[2:]), dtype=ml_dtypes.bfloat16)
    return np.concatenate([stored, room], axis=1)


def _widen(values: np.ndarray, dtype: type) -> np.ndarray:
    """BF16 to float: a BF16 is the upper half of a float32, and shifting is several times as fast
    as the cast of ml_dtypes."""
    bits = values.view(np.uint16).astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32).astype(dtype, copy=False)
