"""The Python clients against a daemon: sessions, blocks, sequences, errors. Each test runs with both clients."""

import asyncio
import datetime
import socket
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from conftest import SMALL
from sluice_client import (
    AbortedError,
    AlreadyExistsError,
    AsyncClient,
    BlockState,
    Client,
    CloseMode,
    DeadlineExceededError,
    DecodeSequence,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OffloadBatch,
    PredictMode,
    ServingStatus,
    SessionState,
    SluiceError,
    Tier,
)

BF16 = np.dtype(ml_dtypes.bfloat16)
SLOT_BYTES = 4096  # K and V of SMALL are 2,048; the host tier counts slots rounded up to 4,096.


def normal(seed, *shape, dtype=BF16):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def blocks_of(seed, count, spec=SMALL):
    """K and V of `count` blocks."""
    shape = count, spec["block_tokens"], spec["num_kv_heads"], spec["head_dim"]
    return normal(2 * seed, *shape), normal(2 * seed + 1, *shape)


def random_bits(seed, count):
    """K and V of `count` blocks of any bits, NaNs among them."""
    bits = np.random.default_rng(seed).integers(0, 1 << 16, (2, count, 8, 2, 32), dtype=np.uint16)
    return bits.view(BF16)


def assert_same_bits(array, expected):
    assert array.dtype == expected.dtype and array.shape == expected.shape
    np.testing.assert_array_equal(array.view(np.uint16), expected.view(np.uint16))


# The daemon.


def test_server_tells_what_it_is(client):
    server = client.get_server()
    assert server.version
    assert server.device.kind in ("cpu", "cuda") and server.device.name and server.device.num_workers > 0
    assert server.device.total_memory_bytes > 0 and server.rss_bytes > 0
    assert server.limits.max_message_bytes > 0 and server.limits.max_sessions > 0
    assert server.start_time <= datetime.datetime.now(datetime.timezone.utc)
    assert {pool.name: pool.budget_bytes for pool in server.memory}.keys() == {"hbm", "host"}


@pytest.mark.parametrize("service", ["", *(f"sluice.v1.{name}Service" for name in
                                           ("Session", "Sequence", "Swap", "Attention", "Admin"))])
def test_health_of_each_service(client, service):
    assert client.health(service) is ServingStatus.SERVING
    changes = client.watch_health(service)
    assert next(changes) is ServingStatus.SERVING
    changes.close()


def test_health_of_an_unknown_service(client):
    with pytest.raises(NotFoundError):
        client.health("sluice.v1.Nothing")


def test_log_level_changes_and_tells_the_one_before(client):
    before = client.set_log_level("debug")
    assert client.set_log_level(before) == "debug"
    with pytest.raises(InvalidArgumentError) as caught:
        client.set_log_level("loud")
    assert caught.value.reason == "INVALID_FIELD" and caught.value.metadata["field"] == "level"


def test_usage_counts_a_session_item_by_item(client, open_session):
    def used(usage, name):
        return next(pool.used_bytes for pool in usage.memory if pool.name == name)

    before = client.get_usage()
    session = open_session(client)
    session.offload_blocks(1, [3, 4], *blocks_of(0, 2))
    usage = client.get_usage()
    (own,) = client.get_usage(session.handle.name).sessions
    assert own in usage.sessions and own.num_blocks == 2 and own.state is SessionState.ATTACHED
    items = {item.name: item for item in own.items}
    assert {"a_g", "a_g_replacement", "projection", "running_state", "split_workspace"} <= set(items)
    assert items["blocks.host"].used_bytes == 2 * SLOT_BYTES
    assert items["a_g"].used_bytes > 0 and all(item.formula for item in own.items if item.name != "blocks.host")
    assert used(usage, "host") - used(before, "host") == 2 * SLOT_BYTES
    reserved = sum(item.reserved_bytes for item in own.items if item.name != "blocks.host")
    assert used(usage, "hbm") - used(before, "hbm") > 0.9 * reserved
    assert session.close(CloseMode.DELETE_DATA) == 2 * SLOT_BYTES
    assert client.get_usage().memory == before.memory
    with pytest.raises(NotFoundError):
        client.get_usage(session.handle.name)


# Sessions.


def test_open_fills_in_the_defaults(client):
    with client.open_session(num_layers=1, num_query_heads=2, num_kv_heads=1, head_dim=16, block_tokens=1,
                             max_blocks=8) as session:
        spec = session.spec
        assert session.handle.name and spec.name == session.handle.name and session.handle.epoch > 0
        assert (spec.rank, spec.max_sequences, spec.tile_blocks) == (16, 64, 256)
        assert (spec.kv_dtype, spec.lease_s, spec.retention_s) == (BF16, 60.0, 0.0)
        assert not session.attached
        info = session.get()
        assert info.state is SessionState.ATTACHED and info.spec == spec and info.handle == session.handle
        assert info.create_time < session.renew()
        assert {item.name for item in info.memory} >= {"a_g", "projection", "running_state", "blocks.host"}
    # Retention is 0: leaving the block has removed it.
    with pytest.raises(NotFoundError) as caught:
        session.get()
    assert caught.value.reason == "SESSION_NOT_FOUND"
    assert caught.value.resource.name == session.handle.name


def test_sessions_are_listed_in_order_of_name(client, open_session):
    names = [f"listed/{index:03}" for index in range(105)]  # More than a page.
    for name in reversed(names):
        open_session(client, name=name, num_layers=1, max_blocks=1, max_sequences=1, tile_blocks=1)
    listed = [info.handle.name for info in client.list_sessions()]
    assert listed == sorted(listed)
    assert [name for name in listed if name.startswith("listed/")] == names


def test_attaching_again_keeps_the_data_and_fences_the_older_handle(client, open_session):
    old = open_session(client, name="again", model_fingerprint=b"weights")
    k, v = blocks_of(1, 2)
    old.offload_blocks(0, [5, 6], k, v, tags=[b"a", b"b"])
    old.put_sequence(0, 1, [5, 6])
    stream = old.decode_stream()
    new = open_session(client, name="again", model_fingerprint=b"weights", lease_s=30)
    assert new.attached and new.handle.epoch > old.handle.epoch and new.spec.lease_s == 30
    assert_same_bits(new.fetch_blocks([6], [0]).k, k[1:])
    assert [sequence.block_ids for sequence in new.list_sequences()] == [(5, 6)]
    for call in (
        old.get,
        old.renew,
        old.list_blocks,
        lambda: old.offload_blocks(0, [1], *blocks_of(2, 1)),
        lambda: old.fetch_blocks([5], [0]),
        lambda: old.put_sequence(1, 1, [5]),
        lambda: old.decode_step(0, [DecodeSequence(0, 16)], normal(3, 1, 4, 32)),
        lambda: old.close(CloseMode.DELETE_DATA),
        lambda: stream.step(0, [DecodeSequence(0, 16)], normal(3, 1, 4, 32)),
    ):
        with pytest.raises(AbortedError) as caught:
            call()
        assert caught.value.reason == "FENCED"
    assert len(new.list_blocks()) == 4  # Two stored, and the two of the other layer that the table reserves.


@pytest.mark.parametrize("change", [{"rank": 8}, {"num_layers": 3}, {"max_blocks": 65}, {"projection_seed": 1},
                                    {"kv_dtype": np.float16}, {"model_fingerprint": b"others"}, {"head_dim": 64}])
def test_attaching_with_another_geometry_changes_nothing(client, open_session, change):
    session = open_session(client)
    with pytest.raises(FailedPreconditionError) as caught:
        client.open_session(**{**SMALL, "name": session.handle.name, **change})
    assert caught.value.reason == "SESSION_MISMATCH"
    assert session.get().handle == session.handle


def test_keeping_data_detaches_and_opening_attaches_again(client, open_session):
    first = open_session(client, name="kept", retention_s=60)
    k, v = random_bits(1, 1)
    first.offload_blocks(0, [0], k, v, predict=PredictMode.OFF)
    assert first.close(CloseMode.KEEP_DATA) == 0
    with pytest.raises(FailedPreconditionError) as caught:
        first.renew()
    assert caught.value.reason == "SESSION_DETACHED"
    (info,) = [info for info in client.list_sessions() if info.handle.name == "kept"]
    assert info.state is SessionState.DETACHED and info.num_blocks == 1
    second = open_session(client, name="kept", retention_s=60)
    assert second.attached
    assert_same_bits(second.fetch_blocks([0], [0]).v, v)


def test_two_schedulers_do_not_see_each_other(daemon, connect, open_session):
    one, other = (open_session(connect(daemon.address)) for _ in range(2))
    a, b = random_bits(1, 2), random_bits(2, 2)
    one.offload_blocks(0, [0, 1], *a, predict=PredictMode.OFF)
    other.offload_blocks(0, [0, 1], *b, predict=PredictMode.OFF)
    one.put_sequence(3, 9, [0])
    assert other.list_sequences() == []
    assert_same_bits(one.fetch_blocks([0, 1], [0]).k, a[0])
    assert_same_bits(other.fetch_blocks([0, 1], [0]).k, b[0])
    one.close(CloseMode.DELETE_DATA)
    assert_same_bits(other.fetch_blocks([0, 1], [0]).v, b[1])


# Blocks.


def test_fetched_blocks_are_the_same_bits(client, open_session):
    session = open_session(client)
    k, v = random_bits(3, 6)
    layers, ids = [0, 0, 0, 1, 1, 1], [7, 0, 63] * 2
    result = session.offload_blocks(layers, ids, k, v, predict=PredictMode.OFF)
    assert (result.stored_blocks, result.predicted_blocks, result.replaced_blocks) == (6, 0, 0)
    assert result.stored_bytes == 6 * SLOT_BYTES
    fetched = session.fetch_blocks([63, 7, 0])  # No layers named: all.
    assert [(block.layer, block.block_id) for block in fetched.blocks] == [
        (layer, block_id) for layer in (0, 1) for block_id in (63, 7, 0)]
    order = [2, 0, 1, 5, 3, 4]
    assert_same_bits(fetched.k, k[order])
    assert_same_bits(fetched.v, v[order])
    pieces = list(session.fetch_stream([7, 0, 63], [1]))
    assert_same_bits(np.concatenate([piece.k for piece in pieces]), k[3:])
    assert [block.block_id for piece in pieces for block in piece.blocks] == [7, 0, 63]


def test_predicted_blocks_are_the_same_bits_too(client, open_session):
    session = open_session(client)
    k, v = blocks_of(4, 3)
    v[0, 0, 0, :2] = np.nan, np.inf
    assert session.offload_blocks(0, [0, 1, 2], k, v).predicted_blocks == 3
    fetched = session.fetch_blocks([0, 1, 2], [0])
    assert_same_bits(fetched.k, k)
    assert_same_bits(fetched.v, v)


def test_tokens_behind_valid_tokens_are_zero(client, open_session):
    session = open_session(client)
    k, v = random_bits(5, 2)
    session.offload_blocks(0, [0, 1], k, v, valid_tokens=[3, 8], predict=PredictMode.OFF)
    fetched = session.fetch_blocks([0, 1], [0])
    k, v = k.copy(), v.copy()
    k[0, 3:] = v[0, 3:] = 0
    assert_same_bits(fetched.k, k)
    assert_same_bits(fetched.v, v)
    assert [block.valid_tokens for block in fetched.blocks] == [3, 8]


def test_a_fetch_larger_than_a_message_comes_in_pieces(client, open_session):
    shape = dict(num_layers=1, num_kv_heads=8, num_query_heads=8, head_dim=128, block_tokens=64, max_blocks=100)
    session = open_session(client, **shape)
    bits = np.random.default_rng(6).integers(0, 1 << 16, (50, 64, 8, 128), dtype=np.uint16).view(BF16)
    for start in (0, 50):
        session.offload_blocks(0, range(start, start + 50), bits, bits[::-1], predict=PredictMode.OFF)
    pieces = list(session.fetch_stream(range(100), [0]))
    assert len(pieces) > 1
    assert_same_bits(np.concatenate([piece.k for piece in pieces]), np.concatenate([bits, bits]))
    assert_same_bits(np.concatenate([piece.v for piece in pieces]), np.concatenate([bits[::-1], bits[::-1]]))
    # A consumer that stops early leaves nothing behind that would hold the next call up.
    some = session.fetch_stream(range(100), [0])
    next(some)
    some.close()
    assert session.drop_blocks(range(100)).dropped_blocks == 100


def test_offload_stream_acks_each_batch_in_order(client, open_session):
    session = open_session(client)
    sets = [blocks_of(seed, 2) for seed in range(6)]
    batches = [OffloadBatch(seed % 2, [2 * seed, 2 * seed + 1], *sets[seed]) for seed in range(6)]
    batches[2] = OffloadBatch(0, [4, 64], *sets[2])  # Beyond max_blocks.
    acks = list(session.offload_stream(iter(batches)))
    assert [ack.batch_id for ack in acks] == list(range(6))
    assert [ack.error is None for ack in acks] == [True, True, False, True, True, True]
    assert acks[2].result is None and acks[2].error.reason == "INVALID_FIELD"
    assert isinstance(acks[2].error, InvalidArgumentError)
    assert all(ack.result.stored_blocks == 2 for ack in acks if ack.error is None)
    assert_same_bits(session.fetch_blocks([10, 11], [1]).k, sets[5][0])
    assert session.describe_blocks([4], [0])[0].state is BlockState.ABSENT


def test_offload_stream_raises_what_its_batches_raise(client, open_session):
    session = open_session(client)

    def batches():
        yield OffloadBatch(0, [0], *blocks_of(0, 1))
        raise KeyError("of the caller's own")

    with pytest.raises(KeyError, match="of the caller's own"):
        list(session.offload_stream(batches()))


def test_a_batch_is_stored_whole_or_not_at_all(client, open_session):
    session = open_session(client)
    k, v = blocks_of(7, 3)
    for ids, reason in (([0, 1, 1], "DUPLICATE_BLOCK"), ([0, 1, 64], "INVALID_FIELD")):
        with pytest.raises(InvalidArgumentError) as caught:
            session.offload_blocks(0, ids, k, v)
        assert caught.value.reason == reason
    assert session.list_blocks() == []


def test_blocks_are_described_listed_found_and_dropped(client, open_session):
    session = open_session(client)
    k, v = blocks_of(8, 3)
    session.offload_blocks(1, [9, 2, 5], k, v, valid_tokens=[8, 1, 8], tags=[b"x", b"y" * 32, b"x"])
    session.offload_blocks(0, [2], k[:1], v[:1], tags=[b"x"], predict=PredictMode.OFF)
    nine, absent = session.describe_blocks([9, 3], [1])
    assert (nine.state, nine.tier, nine.valid_tokens, nine.predicted) == (BlockState.STORED, Tier.HOST, 8, True)
    assert (nine.tag, nine.num_tables) == (b"x", 0) and nine.version > 0
    assert absent.state is BlockState.ABSENT and absent.tier is Tier.UNSPECIFIED and not absent.predicted

    def where(infos):
        return [(info.layer, info.block_id) for info in infos]

    assert where(session.list_blocks()) == [(0, 2), (1, 2), (1, 5), (1, 9)]
    assert where(session.list_blocks([1], Tier.HOST)) == [(1, 2), (1, 5), (1, 9)]
    assert session.list_blocks(tier=Tier.DISK) == []
    assert where(session.find_blocks([b"y" * 32, b"x"])) == [(1, 2), (0, 2), (1, 5), (1, 9)]
    assert where(session.find_blocks([b"x", b"none"], [1])) == [(1, 5), (1, 9)]

    with pytest.raises(NotFoundError) as caught:
        session.drop_blocks([9, 3], [1])
    assert caught.value.reason == "BLOCK_NOT_FOUND" and len(session.list_blocks()) == 4
    dropped = session.drop_blocks([9, 3], [1], allow_missing=True)
    assert (dropped.dropped_blocks, dropped.freed_bytes) == (1, SLOT_BYTES)
    session.put_sequence(0, 1, [5])
    with pytest.raises(FailedPreconditionError) as caught:
        session.drop_blocks([5], [1])
    assert caught.value.reason == "BLOCK_IN_TABLE"


def test_replacing_a_block_replaces_all_of_it(client, open_session):
    session = open_session(client)
    session.offload_blocks(0, [0], *blocks_of(9, 1), tags=[b"old"])
    before = session.describe_blocks([0], [0])[0]
    k, v = blocks_of(10, 1)
    assert session.offload_blocks(0, [0], k, v, tags=[b"new"], valid_tokens=5).replaced_blocks == 1
    after = session.describe_blocks([0], [0])[0]
    assert after.version > before.version and (after.tag, after.valid_tokens) == (b"new", 5)
    assert session.find_blocks([b"old"]) == []
    assert_same_bits(session.fetch_blocks([0], [0]).k[:, :5], k[:, :5])


def test_lists_longer_than_a_page_come_whole(client, open_session):
    tiny = dict(num_layers=2, num_query_heads=1, num_kv_heads=1, head_dim=16, block_tokens=1, max_blocks=1200,
                max_sequences=300)
    session = open_session(client, **tiny)
    k = normal(11, 1200, 1, 1, 16)
    session.offload_blocks(1, range(1200), k, k)
    assert [block.block_id for block in session.list_blocks([1])] == list(range(1200))
    for sequence_id in range(250):
        session.put_sequence(sequence_id, 1, [])
    assert [sequence.sequence_id for sequence in session.list_sequences()] == list(range(250))


# Sequences.


def test_a_sequence_grows_is_forked_cut_and_released(client, open_session):
    session = open_session(client)
    k, v = blocks_of(12, 4)
    for layer in (0, 1):
        session.offload_blocks(layer, [0, 1, 2], k[:3], v[:3])
    put = session.put_sequence(0, 5, [0, 1])
    assert (put.num_blocks, put.reserved_blocks) == (2, 0)
    for _ in range(2):  # A repeat changes nothing.
        put = session.put_sequence(0, 5, [2, 10], base_blocks=2)
        assert put.num_blocks == 4
    assert session.describe_blocks([10], [1])[0].state is BlockState.RESERVED
    (sequence,) = session.list_sequences()
    assert (sequence.generation, sequence.block_ids, sequence.tokens) == (5, (0, 1, 2, 10), 24)

    for _ in range(2):
        assert session.fork_sequence(0, 5, 1, 2, context_tokens=9) == 2
    assert session.describe_blocks([0], [0])[0].num_tables == 2
    for _ in range(2):
        assert session.truncate_sequence(0, 6, 17) == 3
    assert session.describe_blocks([10], [0])[0].state is BlockState.ABSENT  # It was only reserved.
    assert session.describe_blocks([2], [0])[0].valid_tokens == 1
    assert [s.tokens for s in session.list_sequences()] == [17, 16]

    assert session.release_sequences([1]) == 0
    assert session.release_sequences([0], drop_blocks=True) == 6  # 3 ids in 2 layers.
    assert session.list_sequences() == [] and session.list_blocks() == []


def test_sequence_errors_by_reason(client, open_session):
    session = open_session(client)
    session.put_sequence(0, 5, [0, 1])
    session.put_sequence(1, 1, [2])

    def reason_of(call, kind):
        with pytest.raises(kind) as caught:
            call()
        return caught.value.reason

    assert reason_of(lambda: session.put_sequence(0, 4, [0]), AbortedError) == "STALE_GENERATION"
    assert reason_of(lambda: session.put_sequence(0, 6, [3], base_blocks=3), FailedPreconditionError) \
        == "BASE_BEYOND_TABLE"
    assert reason_of(lambda: session.put_sequence(0, 0, [3]), InvalidArgumentError) == "INVALID_FIELD"
    assert reason_of(lambda: session.put_sequence(64, 1, [3]), InvalidArgumentError) == "INVALID_FIELD"
    assert reason_of(lambda: session.put_sequence(2, 1, [3, 3]), InvalidArgumentError) == "INVALID_FIELD"
    assert reason_of(lambda: session.put_sequence(2, 1, [64]), InvalidArgumentError) == "INVALID_FIELD"
    assert reason_of(lambda: session.fork_sequence(7, 1, 8), NotFoundError) == "SEQUENCE_NOT_FOUND"
    assert reason_of(lambda: session.fork_sequence(0, 4, 8), AbortedError) == "STALE_GENERATION"
    assert reason_of(lambda: session.fork_sequence(0, 5, 1), AlreadyExistsError) == "SEQUENCE_EXISTS"
    assert reason_of(lambda: session.truncate_sequence(0, 4, 1), AbortedError) == "STALE_GENERATION"
    assert reason_of(lambda: session.truncate_sequence(0, 6, 17), InvalidArgumentError) == "INVALID_FIELD"
    assert reason_of(lambda: session.truncate_sequence(9, 6, 1), NotFoundError) == "SEQUENCE_NOT_FOUND"
    assert reason_of(lambda: session.release_sequences([1, 9]), NotFoundError) == "SEQUENCE_NOT_FOUND"
    assert [(s.sequence_id, s.generation) for s in session.list_sequences()] == [(0, 5), (1, 1)]


# Errors.


@pytest.mark.parametrize("field, value", [
    ("num_layers", 0), ("num_layers", 1025), ("num_query_heads", 3), ("num_kv_heads", 0), ("head_dim", 12),
    ("head_dim", 264), ("head_dim", 20), ("block_tokens", 3), ("block_tokens", 512), ("rank", 33), ("rank", 129),
    ("max_blocks", 0), ("max_blocks", 1 << 25), ("max_sequences", 1 << 17), ("tile_blocks", 1 << 17),
    ("lease_s", 0.5), ("retention_s", 31 * 86400), ("name", "no spaces"), ("name", "x" * 129),
    ("model_fingerprint", bytes(257)), ("kv_dtype", np.float32), ("host_budget_bytes", -1)])
def test_a_refused_field_is_named(client, field, value):
    with pytest.raises(InvalidArgumentError) as caught:
        client.open_session(**{**SMALL, "name": "refused", field: value})
    error = caught.value
    assert error.reason == "INVALID_FIELD"
    stem = field.removesuffix("_s")
    assert error.metadata["field"] == f"spec.{stem}" and error.metadata["allowed"]
    assert stem in error.message and "value" in error.metadata


def test_malformed_tensors_are_refused(client, open_session):
    session = open_session(client)
    session.put_sequence(0, 1, [0])
    k, v = blocks_of(13, 1)

    def reason_of(call):
        with pytest.raises(InvalidArgumentError) as caught:
            call()
        return caught.value.reason, caught.value.metadata.get("field", "")

    assert reason_of(lambda: session.offload_blocks(0, [0], k[:, :4], v))[1].startswith("k")
    assert reason_of(lambda: session.offload_blocks(0, [0], k, v.astype(np.float32)))[1].startswith("v")
    assert reason_of(lambda: session.offload_blocks(0, [0], k, v[..., :16]))[0] in ("INVALID_FIELD", "UNEQUAL_KV")
    assert reason_of(lambda: session.decode_step(0, [DecodeSequence(0, 1)], normal(1, 2, 4, 32)))[1].startswith("q")
    assert reason_of(lambda: session.decode_step(2, [DecodeSequence(0, 1)], normal(1, 1, 4, 32)))[1] == "layer"
    assert reason_of(lambda: session.score_blocks(0, normal(1, 3, 32), sequence_id=0))[1].startswith("q")
    # Nothing crashed, and nothing was written.
    assert session.list_blocks()[0].state is BlockState.RESERVED
    assert client.health() is ServingStatus.SERVING


def test_missing_blocks_are_named(client, open_session):
    session = open_session(client)
    session.offload_blocks(0, [0], *blocks_of(14, 1))
    with pytest.raises(NotFoundError) as caught:
        session.fetch_blocks([0, 9], [0])
    assert caught.value.reason == "BLOCK_NOT_FOUND" and "9" in caught.value.resource.name
    for call in (
        lambda: session.score_blocks(0, normal(1, 4, 32), block_ids=[0, 9]),
        lambda: session.read_projected_keys(0, [9]),
    ):
        with pytest.raises(NotFoundError) as caught:
            call()
        assert caught.value.reason == "BLOCK_NOT_FOUND"


def test_a_deadline_ends_a_call(connect):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for client, timeout_s in ((connect(address), 0.3), (connect(address, timeout_s=0.3), None)):
            start_s = time.monotonic()
            with pytest.raises(DeadlineExceededError):
                client.get_server(timeout_s=timeout_s)
            assert 0.2 < time.monotonic() - start_s < 10


def test_no_daemon_is_an_error_of_the_same_family(connect):
    with pytest.raises(SluiceError) as caught:
        connect("127.0.0.1:1", timeout_s=5).get_server()
    assert caught.value.code.name == "UNAVAILABLE" and caught.value.reason == ""


def test_unix_socket(daemon, connect):
    assert connect(f"unix:{daemon.socket}").get_server().version


# What only one of the clients has.


def test_threads_share_a_client(daemon):
    failures = []

    def work(client, index):
        try:
            with client.open_session(**SMALL) as session:
                for turn in range(10):
                    k, v = random_bits(100 * index + turn, 2)
                    session.offload_blocks(0, [0, 1], k, v, predict=PredictMode.OFF)
                    assert_same_bits(session.fetch_blocks([0, 1], [0]).k, k)
        except BaseException as error:
            failures.append(error)

    with Client(daemon.address) as client:
        threads = [threading.Thread(target=work, args=(client, index)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_tasks_share_an_asyncio_client(daemon):
    async def work(client, index):
        async with await client.open_session(**SMALL) as session:
            async def batches():
                for turn in range(10):
                    yield OffloadBatch(turn % 2, [turn], *blocks_of(100 * index + turn, 1))

            acks = [ack async for ack in session.offload_stream(batches())]
            assert [ack.result.stored_blocks for ack in acks] == [1] * 10
            fetched = await asyncio.gather(*(session.fetch_blocks([turn], [turn % 2]) for turn in range(10)))
            for turn, piece in enumerate(fetched):
                assert_same_bits(piece.k, blocks_of(100 * index + turn, 1)[0])

    async def main():
        async with AsyncClient(daemon.address) as client:
            await asyncio.gather(*(work(client, index) for index in range(4)))

    asyncio.run(main())
