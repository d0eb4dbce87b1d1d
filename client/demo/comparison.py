"""Greedy decoding, and comparing two runs of it.

    run = decode_greedily(model, prompt.tokens, attention, count=32)
    comparison = compare(run, other_run)
"""

import dataclasses
import time
from typing import Sequence

import ml_dtypes
import numpy as np

from attention import ReferenceAttention
from smollm2 import Attention, Prefill, SmolLM2

# What an attention output may be off from the reference: 2 units in the last place of BF16, or
# this, whichever is larger.
_TOLERANCE = 1e-3
_TOLERANCE_BF16_ULPS = 2


@dataclasses.dataclass
class Run:
    """What a greedy run chose and saw."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logits: list[np.ndarray] = dataclasses.field(default_factory=list)  # before each token
    calls: list[tuple] = dataclasses.field(default_factory=list)  # (layer, q, k, v, out)
    seconds: float = 0.0

    @property
    def ms_per_token(self) -> float:
        return self.seconds / len(self.tokens) * 1e3

    @property
    def smallest_gap(self) -> float:
        """The smallest distance between the two best logits, over all tokens."""
        best = [np.partition(logits, -2)[-2:] for logits in self.logits]
        return float(min(first - second for second, first in best))


def decode_greedily(
    model: SmolLM2, prompt: Sequence[int], attention: Attention, count: int
) -> Run:
    """Decodes `count` tokens after `prompt`, of which `attention` holds all tokens but the last.

    An end of turn does not stop it: what comes after is as good for comparing.
    """
    run = Run()

    def recorded(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        out = attention(layer, q, k, v)
        run.calls.append((layer, q, k, v, out))
        return out

    token, position = prompt[-1], len(prompt) - 1
    begin = time.perf_counter()
    for _ in range(count):
        logits = model.decode(token, position, recorded)
        token, position = int(np.argmax(logits)), position + 1
        run.logits.append(logits)
        run.tokens.append(token)
    run.seconds = time.perf_counter() - begin
    return run


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How two runs differ."""

    identical_tokens: int  # from the first on
    logit_difference: float  # the largest, up to the first token that differs
    output_difference: float  # the largest of an attention output, on the same q, K and V
    outputs: int
    outputs_beyond_tolerance: int


def compare(run: Run, reference_run: Run, prefill: Prefill) -> Comparison:
    """Compares a run with the reference's own, and every attention output of `run` with what
    in-process attention makes of the same q, K and V, beginning from `prefill`."""
    same = [a == b for a, b in zip(run.tokens, reference_run.tokens, strict=True)]
    identical_tokens = same.index(False) if False in same else len(same)
    # The logits that chose the first differing token still come from the same tokens.
    comparable = list(zip(run.logits, reference_run.logits))[: identical_tokens + 1]
    reference = ReferenceAttention(prefill.keys, prefill.values)
    largest, outputs, beyond = [], 0, 0
    for layer, q, k, v, out in run.calls:
        expected = reference(layer, q, k, v)
        difference = np.abs(out - expected)
        largest.append(difference.max())
        outputs += out.size
        # Not (difference > tolerance): a NaN is beyond it.
        beyond += int(np.count_nonzero(~(difference <= _tolerance(expected))))
    return Comparison(
        identical_tokens=identical_tokens,
        logit_difference=float(np.max([np.abs(a - b).max() for a, b in comparable])),
        output_difference=float(np.max(largest)),
        outputs=outputs,
        outputs_beyond_tolerance=beyond,
    )


def _tolerance(expected: np.ndarray) -> np.ndarray:
    # frexp gives a fraction in [1/2, 1), so that a value's power of two is one below its exponent.
    fraction, exponent = np.frexp(expected)
    power_of_two = np.where(fraction == 0, 0, np.ldexp(1.0, exponent - 1))
    ulp = float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps) * power_of_two
    return np.maximum(_TOLERANCE, _TOLERANCE_BF16_ULPS * ulp)
