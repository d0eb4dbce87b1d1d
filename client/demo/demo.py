"""A language model whose decode attention is computed by a Sluice daemon, token for token.

SmolLM2-135M reads a document of some 1,500 tokens in this process. The keys and values of its 30
layers then go to the daemon, and 32 tokens of the answer are decoded greedily twice: once with
attention in this process, once with each layer's attention being one DecodeStep. The tokens must
be the same. Exit status: 0 if they are, 1 if not, 2 where the demo could not run.
"""

import argparse
import contextlib
import os
import sys
import time
from typing import Iterable

# The matrices of a single token are small and the daemon computes beside this process: threads of
# the BLAS library that wait for each other cost several times what they bring where cores are busy.
# The library reads this once, when numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import sluice_client

from attention import ReferenceAttention
from comparison import Comparison, Run, compare, decode_greedily
from prompt import QUESTION, Prompt
from remote import BLOCK_TOKENS, RANK, DaemonError, RemoteAttention, sluiced
from smollm2 import Prefill, SmolLM2

_BAR_CELLS = 30
_SCORE_BAR_CELLS = 12
_PASSAGES = 5

# The layers whose queries look for what the question asks. Those below work on syntax, those
# above on the next word.
_SCORED_LAYERS = range(15, 25)

# --corrupt flips this block of the middle layer: the first, to which every head attends most.
_CORRUPT_BLOCK = 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--corrupt", action="store_true",
        help="flip one stored block after the offload; must end with exit status 1",
    )
    parser.add_argument(
        "--tokens", type=int, default=32, metavar="N", help="tokens to decode (default: 32)"
    )
    parser.add_argument(
        "--address", metavar="HOST:PORT",
        help="use the daemon that listens there (or at unix:PATH) instead of starting one",
    )
    parsed = parser.parse_args(arguments)
    if not 1 <= parsed.tokens <= 256:
        parser.error(f"--tokens is {parsed.tokens}; 1..256 are allowed")
    return parsed


class Progress:
    """A bar on one line: redrawn on a terminal, written once at the end elsewhere."""

    def __init__(self, label: str, total: int, unit: str):
        self._label, self._total, self._unit = label, total, unit

    def show(self, done: int, note: str) -> None:
        terminal = sys.stdout.isatty()
        last = done == self._total
        if not (terminal or last):
            return
        filled = done * _BAR_CELLS // self._total
        bar = "█" * filled + "░" * (_BAR_CELLS - filled)
        line = f"{self._label:<10}{bar} {done}/{self._total} {self._unit}, {note}"
        print(("\r" if terminal else "") + line, end="\n" if last else "", flush=True)


def in_units(count_bytes: int) -> str:
    unit_bytes, unit = (1e6, "MB") if count_bytes >= 1e5 else (1e3, "kB")
    return f"{count_bytes / unit_bytes:,.1f} {unit}"


def offload(remote: RemoteAttention, prefill: Prefill) -> None:
    """Sends all layers, with a progress bar."""
    progress = Progress("offload", len(prefill.keys), "layers")
    stored_bytes = 0
    begin = time.perf_counter()
    for layer, layer_bytes in enumerate(remote.offload(prefill.keys, prefill.values)):
        stored_bytes += layer_bytes
        seconds = time.perf_counter() - begin
        progress.show(layer + 1, f"{in_units(stored_bytes)} in {seconds:.2f} s, rank {RANK}")


def score_blocks(remote: RemoteAttention, prompt: Prompt, prefill: Prefill) -> dict[int, float]:
    """A score for each block that lies wholly in the document: the mean over the question's tokens
    and some layers."""
    blocks = range(
        -(-prompt.document.start // BLOCK_TOKENS), prompt.document.stop // BLOCK_TOKENS
    )
    scores = np.array(
        [
            [
                remote.score(layer, prefill.queries[layer][token], blocks)
                for token in range(len(prompt.question))
            ]
            for layer in _SCORED_LAYERS
        ]
    )
    return dict(zip(blocks, scores.mean(axis=(0, 1)).tolist()))


def print_passages(prompt: Prompt, scores: dict[int, float]) -> None:
    """The best blocks. A bar is empty for the document's median block and full for its best."""
    median, best = np.median(list(scores.values())), max(scores.values())
    print(f"\nThe {_PASSAGES} best-scored blocks for the question, of {len(scores)}:")
    for block in sorted(scores, key=scores.get, reverse=True)[:_PASSAGES]:
        filled = round((scores[block] - median) / (best - median or 1) * _SCORE_BAR_CELLS)
        bar = "█" * filled + "░" * (_SCORE_BAR_CELLS - filled)
        begin = block * BLOCK_TOKENS
        passage = prompt.passage(begin, begin + BLOCK_TOKENS)
        print(f"  {bar} {scores[block]:8.2f}  block {block:2}  {passage}")


def print_answer(model: SmolLM2, run: Run) -> None:
    answer = run.tokens
    if model.tokenizer.end_of_turn in answer:
        answer = answer[: answer.index(model.tokenizer.end_of_turn)]
    print(f"\nquestion  {QUESTION}")
    print(f"answer    {' '.join(model.tokenizer.decode(answer).split())}")


def print_comparison(comparison: Comparison, reference: Run, remote_run: Run) -> None:
    print(f"\ntokens identical: {comparison.identical_tokens}/{len(reference.tokens)}")
    print(
        f"largest difference of an attention output: {comparison.output_difference:.2g} "
        f"({comparison.outputs_beyond_tolerance} of {comparison.outputs:,} beyond the tolerance)"
    )
    smallest_gap = min(reference.smallest_gap, remote_run.smallest_gap)
    print(
        f"smallest gap between the two best logits: {smallest_gap:.2f} "
        f"(largest difference of a logit between the runs: {comparison.logit_difference:.2f})"
    )


def print_times(remote: RemoteAttention, reference: Run, remote_run: Run) -> None:
    step_ms, daemon_ms = (
        np.median(seconds) * 1e3 for seconds in (remote.step_seconds, remote.daemon_seconds)
    )
    print(
        f"\nms a token: {remote_run.ms_per_token:.1f} with DecodeStep, "
        f"{reference.ms_per_token:.1f} in this process"
    )
    print(f"p50 of a DecodeStep, one layer: {step_ms:.2f} ms, {daemon_ms:.2f} ms of it in the daemon")


def print_memory(
    model: SmolLM2, reference: ReferenceAttention, items: Iterable[tuple[str, int, int]]
) -> None:
    print("\nMemory of the daemon's session        in use      reserved")
    for name, used_bytes, reserved_bytes in items:
        print(f"  {name:<30}{in_units(used_bytes):>14}{in_units(reserved_bytes):>14}")
    print("Memory of this process")
    print(f"  {'weights, float32':<30}{in_units(model.weight_bytes):>14}")
    print(f"  {'K and V, BF16':<30}{in_units(reference.kv_bytes):>14}")


def run_demo(
    model: SmolLM2, prompt: Prompt, prefill: Prefill, remote: RemoteAttention,
    count: int, corrupt: bool,
) -> int:
    """Everything behind the prefill; returns the exit status."""
    offload(remote, prefill)
    scores = score_blocks(remote, prompt, prefill)
    if corrupt:
        layer = len(prefill.keys) // 2
        remote.flip_block(layer, _CORRUPT_BLOCK)
        print(f"corrupt   flipped the signs in block {_CORRUPT_BLOCK} of layer {layer}")
    attention = ReferenceAttention(prefill.keys, prefill.values)
    reference = decode_greedily(model, prompt.tokens, attention, count)
    remote_run = decode_greedily(model, prompt.tokens, remote, count)
    comparison = compare(remote_run, reference, prefill)

    print_answer(model, remote_run)
    print_comparison(comparison, reference, remote_run)
    print_times(remote, reference, remote_run)
    print_memory(model, attention, remote.memory())
    print_passages(prompt, scores)
    if comparison.identical_tokens < count or comparison.outputs_beyond_tolerance:
        print("\nThe daemon's attention is not that of this process.")
        return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    parsed = parse_arguments(arguments)
    with contextlib.ExitStack() as stack:
        # First what fails fast.
        address = parsed.address or stack.enter_context(sluiced())
        begin = time.perf_counter()
        model = SmolLM2.load()
        prompt = Prompt.build(model.tokenizer)
        print(f"model     SmolLM2-135M, loaded in {time.perf_counter() - begin:.1f} s")
        begin = time.perf_counter()
        # The last token is the first to be decoded, so that each answer token comes from attention
        # that is compared.
        held = prompt.tokens[:-1]
        prefill = model.prefill(held, kept_queries=len(held) - prompt.question.start)
        seconds = time.perf_counter() - begin
        print(f"prefill   {len(held):,} tokens in {seconds:.1f} s, in this process", flush=True)
        max_tokens = len(held) + parsed.tokens
        remote = stack.enter_context(RemoteAttention(address, model.geometry, max_tokens))
        return run_demo(model, prompt, prefill, remote, parsed.tokens, parsed.corrupt)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (FileNotFoundError, DaemonError, sluice_client.SluiceError) as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(2)
