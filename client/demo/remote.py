"""Decode attention by a Sluice daemon: everything the demo asks of one is in this file.

    with sluiced() as address, RemoteAttention(address, geometry, max_tokens=2048) as attention:
        for stored_bytes in attention.offload(prefill.keys, prefill.values): ...
        out = attention(layer, q, k, v)  # one DecodeStep

Threads: one at a time.
"""

import contextlib
import os
import pathlib
import subprocess
import tempfile
import time
from typing import Iterator, Sequence

import numpy as np
import sluice_client

from smollm2 import Geometry

BLOCK_TOKENS = 16
RANK = 32

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_SEQUENCE_ID = 0
_GENERATION = 1
_HOST_BUDGET_BYTES = 256 << 20
_START_S = 30
_STOP_S = 30


class DaemonError(Exception):
    """The daemon is missing or did not start."""


@contextlib.contextmanager
def sluiced() -> Iterator[str]:
    """Runs a daemon of its own on a Unix socket in a temporary folder, gives its address, and
    stops it at the end. The binary is $SLUICED, or where the build leaves it.

    Raises DaemonError where it is missing, or with its log where it does not start.
    """
    binary = pathlib.Path(os.environ.get("SLUICED") or _ROOT / "bazel-bin/server/sluiced")
    if not binary.exists():
        raise DaemonError(f"{binary} is missing: ./dev demo builds it")
    with tempfile.TemporaryDirectory(prefix="sluice-demo-") as folder_name:
        folder = pathlib.Path(folder_name)
        socket, port_file, log_path = folder / "sluiced.sock", folder / "port", folder / "log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [
                    binary.absolute(),
                    "--listen_address=127.0.0.1:0",
                    f"--port_file={port_file}",
                    f"--unix_socket={socket}",
                    f"--host_budget_bytes={_HOST_BUDGET_BYTES}",
                    f"--hbm_budget_bytes={_HOST_BUDGET_BYTES}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            deadline_s = time.monotonic() + _START_S
            # The daemon writes its port once it serves.
            while not (port_file.exists() and port_file.read_text().strip()):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise DaemonError(f"sluiced did not start:\n{log_path.read_text()}")
                time.sleep(0.01)
            yield f"unix:{socket}"
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class RemoteAttention:
    """One session with one sequence; calling it is one DecodeStep of one layer.

    Every method may raise sluice_client.SluiceError. The session and its blocks go at the end of
    the `with` block.
    """

    def __init__(self, address: str, geometry: Geometry, max_tokens: int):
        """Opens the session. `max_tokens`: offloaded and decoded, together at most."""
        self._client = sluice_client.Client(address)
        self._max_blocks = -(-max_tokens // BLOCK_TOKENS)
        self._session = self._client.open_session(
            name=f"demo-{os.getpid()}",
            num_layers=geometry.num_layers,
            num_query_heads=geometry.num_query_heads,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            block_tokens=BLOCK_TOKENS,
            rank=RANK,
            max_blocks=self._max_blocks,
            max_sequences=1,
        )
        self._tokens = [0] * geometry.num_layers
        self.step_seconds: list[float] = []  # of each DecodeStep, as the caller sees it
        self.daemon_seconds: list[float] = []  # of each, as the daemon reports it

    def __enter__(self) -> "RemoteAttention":
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self._session.close(sluice_client.CloseMode.DELETE_DATA)
        except sluice_client.SluiceError:
            if kind is None:
                raise
        finally:
            self._client.close()

    def offload(
        self, keys: Sequence[np.ndarray], values: Sequence[np.ndarray]
    ) -> Iterator[int]:
        """Stores the prefill's keys and values, [tokens, num_kv_heads, head_dim] per layer, with
        prediction, and makes the sequence; yields the bytes stored after each layer."""
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            tokens = len(k)
            num_blocks = -(-tokens // BLOCK_TOKENS)
            stored = self._session.offload_blocks(
                layer,
                range(num_blocks),
                _in_blocks(k, num_blocks),
                _in_blocks(v, num_blocks),
                valid_tokens=_valid_tokens(tokens, num_blocks),
                predict=sluice_client.PredictMode.REQUIRED,
            )
            self._tokens[layer] = tokens
            yield stored.stored_bytes
        # All blocks at once: ids that are not stored yet are reserved for the tokens to come.
        self._session.put_sequence(_SEQUENCE_ID, _GENERATION, range(self._max_blocks))

    def __call__(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Appends k and v, [num_kv_heads, head_dim], and attends with q, [num_query_heads,
        head_dim], all BF16; the output is float32, as the daemon has accumulated it."""
        context_tokens = self._tokens[layer] + 1
        begin = time.perf_counter()
        step = self._session.decode_step(
            layer,
            [sluice_client.DecodeSequence(_SEQUENCE_ID, context_tokens)],
            q[np.newaxis],
            k[np.newaxis],
            v[np.newaxis],
            out_dtype=np.float32,
        )
        self.step_seconds.append(time.perf_counter() - begin)
        self.daemon_seconds.append(step.stats.total_us * 1e-6)
        self._tokens[layer] = context_tokens
        return step.out[0]

    def score(self, layer: int, q: np.ndarray, block_ids: Sequence[int]) -> np.ndarray:
        """A score of each block for the query q, [num_query_heads, head_dim]: the greatest
        projected dot product over its tokens and the query's heads."""
        return self._session.score_blocks(
            layer, q, block_ids=block_ids, kind=sluice_client.ScoreKind.MAX_DOT
        ).scores

    def flip_block(self, layer: int, block_id: int) -> None:
        """Flips the sign bit of each K and V of one stored block."""
        block = self._session.fetch_blocks([block_id], [layer])
        self._session.offload_blocks(
            layer, [block_id], -block.k, -block.v, valid_tokens=block.blocks[0].valid_tokens
        )

    def memory(self) -> list[tuple[str, int, int]]:
        """What the daemon holds for the session: name, bytes in use and bytes reserved, by kind."""
        usage = self._client.get_usage(self._session.handle.name)
        return [
            (item.name, item.used_bytes, item.reserved_bytes)
            for session in usage.sessions
            for item in session.items
        ]


def _in_blocks(values: np.ndarray, num_blocks: int) -> np.ndarray:
    """[tokens, ...] as [num_blocks, BLOCK_TOKENS, ...], filled up with zeros."""
    blocks = np.zeros((num_blocks * BLOCK_TOKENS, *values.shape[1:]), values.dtype)
    blocks[: len(values)] = values
    return blocks.reshape(num_blocks, BLOCK_TOKENS, *values.shape[1:])


def _valid_tokens(tokens: int, num_blocks: int) -> list[int]:
    return [min(BLOCK_TOKENS, tokens - block * BLOCK_TOKENS) for block in range(num_blocks)]
