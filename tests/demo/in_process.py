"""Stands in for the demo's RemoteAttention in tests that are about the demo, not the daemon."""

import numpy as np

from attention import ReferenceAttention
from remote import BLOCK_TOKENS, RANK


class InProcessAttention:
    """The face of RemoteAttention over float64 attention in this process."""

    def __init__(self):
        self.step_seconds = [0.0]
        self.daemon_seconds = [0.0]

    def offload(self, keys, values):
        self._keys = [np.array(k) for k in keys]
        self._values = [np.array(v) for v in values]
        for k, v in zip(keys, values):
            yield k.nbytes + v.nbytes
        self._attention = None

    def __call__(self, layer, q, k, v):
        if self._attention is None:
            self._attention = ReferenceAttention(self._keys, self._values, np.float64)
        return self._attention(layer, q, k, v)

    def score(self, layer, q, block_ids):
        head_dim = q.shape[-1]
        projection = np.random.default_rng(0).normal(scale=RANK**-0.5, size=(head_dim, RANK))
        tokens = [
            self._keys[layer][block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
            for block in block_ids
        ]
        # [block, token, kv_head, rank] and [kv_head, group, rank]
        keys = np.stack(tokens).astype(np.float64) @ projection
        queries = (q.astype(np.float64) @ projection).reshape(keys.shape[2], -1, RANK)
        return np.einsum("bthr,hgr->bthg", keys, queries).max(axis=(1, 2, 3))

    def flip_block(self, layer, block_id):
        tokens = slice(block_id * BLOCK_TOKENS, (block_id + 1) * BLOCK_TOKENS)
        for stored in (self._keys, self._values):
            stored[layer][tokens] = -stored[layer][tokens]

    def memory(self):
        return [("stand-in", 1, 2)]
