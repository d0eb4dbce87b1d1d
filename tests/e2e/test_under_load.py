"""Many clients at once, in each other's way: every block read is wholly one version, and nothing is left behind."""

import random
import threading
import time

import ml_dtypes
import numpy as np
from sluice_client import (
    Client,
    CloseMode,
    DecodeSequence,
    OffloadBatch,
    SequenceUpdate,
    SluiceError,
    TileRow,
)

BF16 = np.dtype(ml_dtypes.bfloat16)
LOAD_S = 6
SPEC = dict(num_layers=2, num_query_heads=8, num_kv_heads=2, head_dim=64, block_tokens=16, max_blocks=64,
            max_sequences=16, lease_s=3600)
NO_QUERY = np.zeros((1, 8, 64), BF16)  # Every logit is 0: the output is the mean of V.
EXPECTED = {
    "ABORTED", "FAILED_PRECONDITION", "NOT_FOUND", "RESOURCE_EXHAUSTED"}  # What being in each other's way comes to.


def stamped(chance, count):
    """Blocks that are one number throughout, in K and in V: a mixture of two versions shows."""
    stamps = np.array([chance.randrange(1, 250) for _ in range(count)], np.float32)
    return np.broadcast_to(stamps[:, None, None, None], (count, 16, 2, 64)).astype(BF16)


def assert_whole(values):
    values = np.asarray(values, np.float32)
    assert (values == values.flat[0]).all() and values.flat[0] > 0, values


def offload(session, chance):
    count = chance.randrange(1, 9)
    k = stamped(chance, count)
    session.offload_blocks(chance.randrange(2), chance.sample(range(48), count), k, k)


def offload_stream(session, chance):
    def batches():
        for _ in range(10):
            k = stamped(chance, 4)
            yield OffloadBatch(chance.randrange(2), chance.sample(range(48), 4), k, k)

    for _ in session.offload_stream(batches()):
        if chance.random() < 0.02:
            break


def fetch(session, chance):
    for piece in session.fetch_stream(chance.sample(range(40), 10), [chance.randrange(2)]):
        for k, v in zip(piece.k, piece.v):
            assert_whole([k, v])
        if chance.random() < 0.05:
            break


def decode(session, chance):
    sequence_id = chance.randrange(16)
    session.put_sequence(sequence_id, 1 << 40, [chance.randrange(40)])
    assert_whole(session.decode_step(chance.randrange(2), [DecodeSequence(sequence_id, 16)], NO_QUERY).out)


def decode_stream(session, chance):
    with session.decode_stream() as stream:
        for _ in range(30):
            stream.send(chance.randrange(2), [DecodeSequence(chance.randrange(16), 16)], NO_QUERY)
        for _ in range(chance.choice([0, 5, 30])):
            reply = stream.receive()
            if reply.error is None and reply.result.errors == (None,):
                assert_whole(reply.result.out)


def tiles(session, chance):
    run_id = session.begin_tiles(0, NO_QUERY)
    try:
        session.step_tile(run_id, 0, [TileRow([chance.randrange(48)])])
        if chance.random() < 0.7:
            assert_whole(session.finalize_tiles(run_id).out)
    finally:
        session.abort_tiles(run_id)


def drop(session, chance):
    if chance.random() < 0.5:
        session.drop_blocks(chance.sample(range(48), 2), allow_missing=True)
    else:
        session.release_sequences([chance.randrange(16)], drop_blocks=chance.random() < 0.5)
    time.sleep(0.002)


def look(session, chance):
    session.list_blocks()
    session.list_sequences()
    session.score_blocks(0, np.ones((8, 64), BF16), block_ids=chance.sample(range(40), 3), top_k=2)
    session.read_projected_keys(1, chance.sample(range(40), 3))


def come_and_go(session, chance):
    """Other connections open, take over, leave and delete sessions."""
    with Client(session.address) as client:
        own = client.open_session(name=f"shared{chance.randrange(3)}", **SPEC)
        k = stamped(chance, 8)
        own.offload_blocks(0, range(8), k, k)
        own.put_sequence(0, 1 << 40, range(8))
        own.decode_step(0, [DecodeSequence(0, 128)], NO_QUERY)
        if chance.random() < 0.6:
            own.close(CloseMode.DELETE_DATA)


def append(session, chance):
    """A session of its own grows token by token, undisturbed."""
    with Client(session.address) as client:
        own = client.open_session(**SPEC)
        for position in range(40):
            token = np.full((1, 2, 64), position + 1, BF16)
            update = SequenceUpdate(1, [position // 16], position // 16)
            step = own.decode_step(
                0, [DecodeSequence(0, position + 1, update=update)], NO_QUERY, token, token, out_dtype=np.float32)
            np.testing.assert_allclose(step.out, (position + 2) / 2, rtol=1e-3)
        own.close(CloseMode.DELETE_DATA)


WORKERS = [offload, offload, offload_stream, fetch, fetch, decode, decode, decode_stream, tiles, drop, look,
           come_and_go, come_and_go, append]


def test_what_is_read_is_whole_and_nothing_is_left_behind(start_daemon):
    running = start_daemon("--log_level=warning", f"--max_inflight_bytes={64 << 20}")
    failures, successes = [], dict.fromkeys(WORKERS, 0)
    with Client(running.address, timeout_s=30) as client:
        session = client.open_session(name="contended", **SPEC)
        session.address = running.address
        end_s = time.monotonic() + LOAD_S

        def work(action, seed):
            chance = random.Random(seed)
            while time.monotonic() < end_s and not failures:
                try:
                    action(session, chance)
                    successes[action] += 1
                except SluiceError as error:
                    if error.code.name not in EXPECTED:
                        failures.append((action.__name__, error))
                except BaseException as error:
                    failures.append((action.__name__, error))

        threads = [threading.Thread(target=work, args=item) for item in zip(WORKERS, range(len(WORKERS)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert all(successes.values()), successes
        for info in client.list_sessions():
            client.open_session(name=info.handle.name, **SPEC).close(CloseMode.DELETE_DATA)
        usage = client.get_usage()
        assert usage.inflight_bytes == 0 and all(pool.used_bytes == 0 for pool in usage.memory)
