"""Comparing two greedy runs."""

import ml_dtypes
import numpy as np
import pytest
from attention import ReferenceAttention
from comparison import Run, _tolerance, compare
from smollm2 import Prefill


@pytest.fixture
def two_runs():
    """The same run twice, and the prefill before it: one layer, one head, three tokens."""
    rng = np.random.default_rng(8)
    k, v = rng.standard_normal((2, 5, 1, 16)).astype(ml_dtypes.bfloat16)
    prefill = Prefill([k], [v], [], np.zeros(4, np.float32))

    def run():
        rng = np.random.default_rng(9)
        attention = ReferenceAttention([k], [v])
        made = Run(tokens=[0, 1, 2], logits=[np.eye(4, dtype=np.float32)[i] for i in range(3)])
        for _ in range(3):
            q, new_k, new_v = rng.standard_normal((3, 1, 16)).astype(ml_dtypes.bfloat16)
            out = attention(0, q, new_k, new_v)
            made.calls.append((0, q, new_k, new_v, out))
        return made

    return run(), run(), prefill


def test_equal_runs(two_runs):
    comparison = compare(*two_runs)
    assert comparison.identical_tokens == 3
    assert comparison.logit_difference == 0
    assert comparison.output_difference == 0
    assert (comparison.outputs, comparison.outputs_beyond_tolerance) == (48, 0)


def test_tokens_after_the_first_difference_do_not_count(two_runs):
    run, reference, prefill = two_runs
    run.tokens[1] = 3
    run.logits[1] = run.logits[1] + np.float32(0.25)
    run.logits[2] = run.logits[2] + np.float32(100)  # After another token, so not comparable.
    comparison = compare(run, reference, prefill)
    assert comparison.identical_tokens == 1
    assert comparison.logit_difference == 0.25


@pytest.mark.parametrize("wrong", [0.5, -0.5, np.nan, np.inf])
def test_a_wrong_output_is_beyond_the_tolerance(two_runs, wrong):
    run, reference, prefill = two_runs
    run.calls[2][4][0, 7] += wrong
    comparison = compare(run, reference, prefill)
    assert comparison.outputs_beyond_tolerance == 1
    assert not comparison.output_difference < 0.4


def test_an_output_rounded_to_bf16_is_within_the_tolerance(two_runs):
    run, reference, prefill = two_runs
    for call in run.calls:
        call[4][:] = call[4].astype(ml_dtypes.bfloat16).astype(np.float32)
    assert compare(run, reference, prefill).outputs_beyond_tolerance == 0


def test_tolerance_is_two_bf16_ulps_but_never_below_its_floor():
    expected = np.array([0.0, 1e-3, 1.0, -1.5, 2.0, 100.0], np.float32)
    np.testing.assert_array_equal(
        _tolerance(expected), [1e-3, 1e-3, 2 / 128, 2 / 128, 4 / 128, 128 / 128]
    )


def test_smallest_gap():
    run = Run(logits=[np.array([3.0, 1.0, 2.5]), np.array([0.0, 9.0, 1.0])])
    assert run.smallest_gap == 0.5
