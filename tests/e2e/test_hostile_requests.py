"""Requests that no client would make: whatever comes, the daemon answers, stays up and keeps to its other sessions."""

import random

import grpc
import numpy as np
import pytest
from conftest import SMALL
from google.protobuf.descriptor import FieldDescriptor
from sluice_client import (
    AttentionOptions,
    Client,
    CloseMode,
    DecodeSequence,
    OffloadBatch,
    SequenceUpdate,
    ServingStatus,
    TileRow,
)
from sluice_client._calls import admin, attention, blocks, sequences, sessions
from test_python_client import assert_same_bits, blocks_of, normal

METHODS = {
    **sessions.METHODS, **sequences.METHODS, **blocks.METHODS, **attention.METHODS, **admin.METHODS}
REQUESTS = 3000
CALL_LIMIT_S = 20

SHAPES = [(1, 4, 32), (2, 4, 32), (4, 32), (1, 2, 32), (1, 8, 2, 32), (2, 8, 2, 32), (0, 4, 32), (1, 5)]
NEAR = {  # Fields in which such small values mostly mean something.
    "layer": 3, "layers": 3, "block_id": 66, "block_ids": 66, "sequence_id": 5, "sequence_ids": 5,
    "source_sequence_id": 5, "target_sequence_id": 5, "generation": 4, "source_generation": 4, "target_generation": 4,
    "base_blocks": 3, "query_tokens": 3, "context_tokens": 30, "valid_tokens": 9, "run_id": 40, "tile_index": 3,
    "top_k": 4, "last_block_valid_tokens": 9}
FLOATS = [0.0, 1.0, -1.0, 1e30, -1e30, float("nan"), float("inf"), float("-inf")]
INTEGERS = {
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1), FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1), FieldDescriptor.TYPE_INT64: (-(1 << 63), (1 << 63) - 1)}


def valid_calls(session, chance):
    """Calls as a scheduler makes them, one a method, streams by their first message."""
    layer, ids, sequence_id = chance.randrange(2), chance.sample(range(16), 3), chance.randrange(4)
    k, v = blocks_of(chance.randrange(100), 3)
    q, token = normal(chance.randrange(100), 2, 4, 32), normal(chance.randrange(100), 2, 2, 32)
    update = SequenceUpdate(1 << 40, ids)
    step = [DecodeSequence(sequence_id, 18, 2, update=update)]
    batch = OffloadBatch(layer, ids, k, v)
    decode = (session, layer, step, q, token, token, AttentionOptions(), None, True)
    rows = [TileRow(ids[:1]), TileRow(ids[1:])]
    spec = {**SMALL, "name": "target", "lease_s": 3600}
    calls = [
        sessions.open_session(**spec), sessions.list_sessions(), sessions.get(session), sessions.renew(session),
        sessions.close(session, 2), admin.get_server(), admin.get_usage(), admin.set_log_level("error"),
        sequences.put_sequence(session, sequence_id, 1 << 40, ids), sequences.list_sequences(session),
        sequences.fork_sequence(session, sequence_id, 1 << 40, chance.randrange(4), 1 << 40),
        sequences.truncate_sequence(session, sequence_id, 1 << 41, chance.randrange(24)),
        sequences.release_sequences(session, [sequence_id], drop_blocks=True),
        blocks.offload_blocks(session, layer, ids, k, v), blocks.fetch_blocks(session, ids, [layer]),
        blocks.describe_blocks(session, ids), blocks.list_blocks(session), blocks.find_blocks(session, [b"tag"]),
        blocks.drop_blocks(session, ids, allow_missing=True),
        attention.score_blocks(session, layer, q[0], block_ids=ids, top_k=2),
        attention.read_projected_keys(session, layer, ids), attention.decode_step(*decode[:6]),
        attention.begin_tiles(session, layer, q), attention.step_tile(session, chance.randrange(40), 0, rows),
        attention.finalize_tiles(session, chance.randrange(40), return_lse=True, return_state=True),
        attention.abort_tiles(session, chance.randrange(40))]
    requests = {call.method.path.rsplit("/", 1)[1]: call.request for call in calls}
    requests["OffloadStream"] = blocks.offload_stream_request(session, 1, batch)
    requests["DecodeStream"] = attention.stream_request(1, attention.decode_request(*decode), 5.0)
    assert requests.keys() == METHODS.keys()
    return requests


class Mutator:
    """Puts values into requests that are valid, at an edge, or nonsense."""

    def __init__(self, chance):
        self.random = chance

    def mutate(self, message):
        """Changes one field, at any depth."""
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        field = self.random.choice(fields)
        inner = None
        if field.message_type and self.random.random() < 0.7:
            if not field.is_repeated and message.HasField(field.name):
                inner = getattr(message, field.name)
            elif field.is_repeated and getattr(message, field.name):
                inner = self.random.choice(getattr(message, field.name))
        if inner is None:
            self.fill_field(message, field)
        else:
            self.mutate(inner)

    def fill(self, message):
        if message.DESCRIPTOR.full_name == "sluice.v1.Tensor":
            self.fill_tensor(message)
        else:
            for field in message.DESCRIPTOR.fields:
                if self.random.random() < 0.8:
                    self.fill_field(message, field)

    def fill_tensor(self, tensor):
        tensor.Clear()
        tensor.dtype = self.random.choice([1, 1, 1, 1, 1, 0, 2, 3, 9])
        shape = self.random.choice(SHAPES)
        tensor.data = self.random.randbytes(int(np.prod(shape)) * (4 if tensor.dtype == 3 else 2))
        wild = [self.random.choice([-1, 0, 1, 1 << 31, 1 << 62]) for _ in range(5)]
        tensor.shape.extend(self.random.choice([shape, shape, shape, (), wild]))

    def fill_field(self, message, field):
        message.ClearField(field.name)
        if field.is_repeated:
            values = getattr(message, field.name)
            for _ in range(self.random.choice([0, 1, 1, 2, 3])):
                if field.message_type:
                    self.fill(values.add())
                else:
                    values.append(self.value(field))
        elif field.message_type:
            self.fill(getattr(message, field.name))
        else:
            setattr(message, field.name, self.value(field))

    def value(self, field):
        pick = self.random.choice
        if field.name in NEAR and self.random.random() < 0.7:
            return self.random.randrange(NEAR[field.name])
        if field.type in INTEGERS:
            least, most = INTEGERS[field.type]
            return pick([0, 1, 2, 16, 64, 1000, least, most, most // 2])
        if field.type == FieldDescriptor.TYPE_ENUM:
            return pick([0, 1, 1, 2, 3, 77])
        if field.type == FieldDescriptor.TYPE_BOOL:
            return pick([False, True])
        if field.type == FieldDescriptor.TYPE_STRING:
            return pick(["", "a", "hostile", "x" * 300, "\u00e9", "a b"])
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self.random.randbytes(pick([0, 1, 32, 33, 300]))
        return pick(FLOATS)

    def request(self, message):
        """Bytes of a request with some fields changed; a few are no message at all."""
        for _ in range(self.random.choice([0, 1, 1, 1, 2, 5])):
            self.mutate(message)
        data = bytearray(message.SerializeToString())
        if data and self.random.random() < 0.03:
            for _ in range(3):
                data[self.random.randrange(len(data))] = self.random.randrange(256)
        return bytes(data)


def send(channel, name, request, repeats):
    """Makes one call; raises grpc.RpcError where it fails."""
    streams = name in ("OffloadStream", "DecodeStream")
    kind = ("stream" if streams else "unary") + ("_stream" if streams or name == "FetchBlocks" else "_unary")
    stub = getattr(channel, kind)(METHODS[name].path, request_serializer=None, response_deserializer=None)
    if streams:
        replies = list(stub(iter([request] * repeats), timeout=CALL_LIMIT_S))
        assert len(replies) == repeats
    elif name == "FetchBlocks":
        list(stub(request, timeout=CALL_LIMIT_S))
    else:
        stub(request, timeout=CALL_LIMIT_S)


def close_all(client):
    """Opens every session again with its own spec, and deletes it."""
    fixed = ("num_layers", "num_query_heads", "num_kv_heads", "head_dim", "block_tokens", "kv_dtype", "rank",
             "projection_seed", "max_blocks", "max_sequences", "tile_blocks", "model_fingerprint")
    for info in client.list_sessions():
        fields = {name: getattr(info.spec, name) for name in fixed}
        client.open_session(name=info.handle.name, **fields).close(CloseMode.DELETE_DATA)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_that_is_sent_does_harm(start_daemon, seed):
    running = start_daemon("--log_level=error", "--max_tile_runs_per_session=16")
    chance = random.Random(seed)
    mutator = Mutator(chance)
    with Client(running.address) as client, grpc.insecure_channel(running.address) as channel:
        bystander = client.open_session(**{**SMALL, "name": "bystander", "lease_s": 3600})
        k, v = blocks_of(seed, 8)
        bystander.offload_blocks(0, range(8), k, v)
        bystander.put_sequence(0, 1, range(8))
        target = None
        for _ in range(REQUESTS):
            if target is None or chance.random() < 0.02:
                target = client.open_session(**{**SMALL, "name": "target", "lease_s": 3600})
            name, message = chance.choice(sorted(valid_calls(target, chance).items()))
            request = mutator.request(message)
            if name in ("CloseSession", "OpenSession"):
                target = None
            try:
                send(channel, name, request, chance.randrange(1, 4))
            except grpc.RpcError as error:
                code = error.code().name
                assert code not in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN"), (name, request, error.details())
                # What gRPC itself cannot read as a message never comes to the daemon's own checks.
                told = dict(error.trailing_metadata() or ())
                assert "grpc-status-details-bin" in told or code in ("INTERNAL", "CANCELLED"), (name, request, code)
            assert running.process.poll() is None, (name, request, running.log.read_text())
        assert client.health() is ServingStatus.SERVING
        # The session beside it is as it was.
        fetched = bystander.fetch_blocks(range(8), [0])
        assert_same_bits(fetched.k, k)
        assert_same_bits(fetched.v, v)
        assert [s.block_ids for s in bystander.list_sequences()] == [tuple(range(8))]
        close_all(client)
        usage = client.get_usage()
        assert usage.inflight_bytes == 0 and all(pool.used_bytes == 0 for pool in usage.memory)
