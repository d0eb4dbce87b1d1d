"""The model of the demo: tokens, prefill and decode."""

import ml_dtypes
import numpy as np
import pytest
from attention import ReferenceAttention
from comparison import decode_greedily
from prompt import read_document
from smollm2 import SmolLM2, _causal_attention, chat_prompt


@pytest.mark.parametrize(
    "text", [read_document(), "Wasser, 水 und eau: 1794\n\n\tmiles  ", "def f(x):\n    return x\n"]
)
def test_tokenizer_round_trip(model, text):
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text


def test_tokenizer_splits_digits(model):
    tokens = model.tokenizer.encode("1862")
    assert [model.tokenizer.decode([token]) for token in tokens] == list("1862")


def test_tokenizer_markers_are_one_token(model):
    first, *_, last = model.tokenizer.encode("<|im_start|>user\nHello<|im_end|>")
    assert last == model.tokenizer.end_of_turn
    assert model.tokenizer.decode([first, last]) == ""


def test_tokenizer_spans_cover_the_text(model):
    text = "The lock has three gates."
    spans = model.tokenizer.spans(text)
    assert "".join(text[begin:end] for begin, end in spans) == text
    assert len(spans) == len(model.tokenizer.encode(text))


def test_answers_paris(model):
    tokens = model.tokenizer.encode(chat_prompt("What is the capital of France?"))
    prefill = model.prefill(tokens[:-1])
    attention = ReferenceAttention(prefill.keys, prefill.values)
    run = decode_greedily(model, tokens, attention, count=12)
    assert "Paris" in model.tokenizer.decode(run.tokens)


def test_prefill_equals_decode_token_by_token(model):
    tokens = model.tokenizer.encode(read_document())[:40]
    prefill = model.prefill(tokens, kept_queries=1)

    geometry = model.geometry
    empty = np.empty((0, geometry.num_kv_heads, geometry.head_dim), ml_dtypes.bfloat16)
    attention = ReferenceAttention([empty] * geometry.num_layers, [empty] * geometry.num_layers)
    seen = {}

    def recorded(layer, q, k, v):
        seen[layer, len(seen) // geometry.num_layers] = (q, k, v)
        return attention(layer, q, k, v)

    for position, token in enumerate(tokens):
        logits = model.decode(token, position, recorded)

    # A last bit of float32 can turn into one of BF16, and deeper layers amplify it.
    np.testing.assert_allclose(logits, prefill.logits, atol=0.5)
    assert np.argmax(logits) == np.argmax(prefill.logits)
    for layer in range(geometry.num_layers):
        for which, stacked in ((1, prefill.keys[layer]), (2, prefill.values[layer])):
            decoded = np.stack([seen[layer, position][which] for position in range(len(tokens))])
            difference = np.abs(decoded.astype(np.float32) - stacked.astype(np.float32))
            assert difference.max() <= 0.05 * np.abs(stacked.astype(np.float32)).max()
        last_q = seen[layer, len(tokens) - 1][0].astype(np.float32)
        prefill_q = prefill.queries[layer][0].astype(np.float32)
        assert np.abs(last_q - prefill_q).max() <= 0.05 * np.abs(prefill_q).max()


def test_causal_attention_equals_the_formula_across_row_blocks():
    rng = np.random.default_rng(3)
    tokens, query_heads, kv_heads, head_dim = 600, 6, 2, 16
    q, k, v = (
        rng.standard_normal((tokens, heads, head_dim)).astype(ml_dtypes.bfloat16)
        for heads in (query_heads, kv_heads, kv_heads)
    )
    out = _causal_attention(q, k, v)
    for head in range(query_heads):
        head_k, head_v = (
            stored[:, head // (query_heads // kv_heads)].astype(np.float64) for stored in (k, v)
        )
        logits = q[:, head].astype(np.float64) @ head_k.T / np.sqrt(head_dim)
        logits[np.triu_indices(tokens, 1)] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        expected = weights @ head_v / weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(out[:, head], expected, atol=1e-5)


def test_load_says_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        SmolLM2.load(tmp_path / "absent.gguf")
