#!/usr/bin/env python3
"""Decode against FlashInfer, on a machine with a GPU, PyTorch and FlashInfer.

    flashinfer_bench.py path/to/cuda_bench

Both run as CUDA graphs over equal inputs that rotate through at least 1 GiB, in turn, round by round: `cuda_bench --serve`
in a process of its own, FlashInfer here. Of FlashInfer's two decode kernels the better one counts. Each line is JSON
(microseconds of one launch, medians); a table comes last.
"""

import json
import statistics
import subprocess
import sys

import flashinfer
import torch

KV_HEADS = 8
HEAD_DIM = 128
ROUNDS = 11
ROTATION_BYTES = 1 << 30
WORKSPACE_BYTES = 256 << 20
SHAPES = [(64, 8192), (8, 32768), (16, 8192), (1, 131072), (64, 1024), (1, 8192)]
GROUPS = [1, 4, 8]
BLOCK_TOKENS = [16, 64]


class Sluice:
    """cuda_bench, one case at a time."""

    def __init__(self, program):
        self.process = subprocess.Popen([program, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def open(self, batch, context, group, block_tokens):
        assert self.ask(f"{batch} {context} {group} {block_tokens}") == "ready"

    def time_us(self):
        return float(self.ask("time"))

    def close(self):
        self.process.stdin.write("end\n")
        self.process.stdin.flush()


class FlashInfer:
    """A graph of launches of one of FlashInfer's decode kernels."""

    def __init__(self, batch, context, group, block_tokens, tensor_cores):
        pages = batch * context // block_tokens
        page_shape = (2, KV_HEADS, block_tokens, HEAD_DIM)
        case_bytes = pages * 2 * KV_HEADS * block_tokens * HEAD_DIM * 2
        sets = max(1, ROTATION_BYTES // case_bytes)
        self.launches = max(sets, 8)
        cache = torch.empty((sets * pages, *page_shape), dtype=torch.bfloat16, device="cuda").normal_()
        q = torch.randn((batch, KV_HEADS * group, HEAD_DIM), dtype=torch.bfloat16, device="cuda")
        order = torch.randperm(sets * pages, device="cuda", dtype=torch.int64).to(torch.int32)
        indptr = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * (context // block_tokens)
        last = torch.full((batch,), block_tokens, device="cuda", dtype=torch.int32)
        workspaces = [torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda") for _ in range(min(sets, 2))]
        self.wrappers = []
        for i in range(sets):
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspaces[i % len(workspaces)], "HND", use_tensor_cores=tensor_cores
            )
            self.wrappers.append(wrapper)
            # A plan lies in the wrapper's own integer workspace; the large one holds partial results only.
            wrapper.plan(
                indptr,
                order[i * pages : (i + 1) * pages].contiguous(),
                last,
                KV_HEADS * group,
                KV_HEADS,
                HEAD_DIM,
                block_tokens,
                q_data_type=torch.bfloat16,
                kv_data_type=torch.bfloat16,
            )
        self.keep = (cache, q, order, indptr, last, workspaces)
        out = torch.empty_like(q)
        run = lambda i: self.wrappers[i % sets].run(q, cache, out=out)
        for i in range(sets):
            run(i)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(self.launches):
                run(i)
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.time_us()

    def time_us(self):
        self.begin.record()
        self.graph.replay()
        self.end.record()
        self.end.synchronize()
        return 1e3 * self.begin.elapsed_time(self.end) / self.launches


def bench_row(sluice, batch, context, group, block_tokens):
    sluice.open(batch, context, group, block_tokens)
    others = {}
    for tensor_cores in (True, False):
        try:
            others["tensor cores" if tensor_cores else "cuda cores"] = FlashInfer(
                batch, context, group, block_tokens, tensor_cores
            )
        except (RuntimeError, ValueError) as error:
            print(f"FlashInfer does not take this case: {error}", file=sys.stderr)
    ours, theirs = [], {name: [] for name in others}
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        ours.append(sluice.time_us())
        for name, other in others.items():
            theirs[name].append(other.time_us())
    sluice.close()
    kernel = min(theirs, key=lambda name: statistics.median(theirs[name]))
    row = {
        "name": f"decode {batch} x {context // 1024}K gqa {group} block {block_tokens}",
        "value": round(statistics.median(ours), 2),
        "unit": "us",
        "flashinfer": round(statistics.median(theirs[kernel]), 2),
        "kernel": kernel,
    }
    row["ratio"] = round(row["value"] / row["flashinfer"], 3)
    print(json.dumps(row), flush=True)
    del others
    torch.cuda.empty_cache()
    return row


def main():
    sluice = Sluice(sys.argv[1])
    rows = [
        bench_row(sluice, batch, context, group, block_tokens)
        for block_tokens in BLOCK_TOKENS
        for group in GROUPS
        for batch, context in SHAPES
    ]
    print(f"\n{'row':<36} {'Sluice us':>10} {'FlashInfer us':>14} {'ratio':>7}  FlashInfer's kernel")
    for row in rows:
        print(
            f"{row['name']:<36} {row['value']:>10.2f} {row['flashinfer']:>14.2f} {row['ratio']:>7.3f}  {row['kernel']}"
        )


if __name__ == "__main__":
    main()
