"""Attention, scores and tiles through the Python clients, against a float64 reference. Each test runs with both."""

import asyncio
import math

import ml_dtypes
import numpy as np
import pytest
import reference
from conftest import SMALL
from reference import assert_close
from sluice_client import (
    AbortedError,
    AsyncClient,
    AttentionOptions,
    DecodeSequence,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PredictMode,
    ResourceExhaustedError,
    ScoreKind,
    SequenceUpdate,
    TileRow,
)

BF16 = np.dtype(ml_dtypes.bfloat16)
HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 4, 2, 32, 8  # SMALL's


def normal(seed, *shape, dtype=BF16):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


class Context:
    """K and V of a sequence's tokens, stored in a session under blocks first_block, first_block + 1, ..."""

    def __init__(self, session, tokens, sequence_id=0, layer=0, first_block=0, seed=0, predict=PredictMode.REQUIRED):
        spec = session.spec
        count = -(-tokens // spec.block_tokens)
        shape = count * spec.block_tokens, spec.num_kv_heads, spec.head_dim
        self.k = normal(1000 + seed, *shape, dtype=spec.kv_dtype)
        self.v = normal(2000 + seed, *shape, dtype=spec.kv_dtype)
        self.tokens = tokens
        self.block_ids = list(range(first_block, first_block + count))
        valid = [spec.block_tokens] * count
        valid[-1] = tokens - (count - 1) * spec.block_tokens
        blocks = count, spec.block_tokens, spec.num_kv_heads, spec.head_dim
        session.offload_blocks(
            layer, self.block_ids, self.k.reshape(blocks), self.v.reshape(blocks), valid_tokens=valid, predict=predict)
        session.put_sequence(sequence_id, 1, self.block_ids)
        self.k, self.v = self.k[:tokens], self.v[:tokens]

    def attend(self, q, tokens=None, **options):
        return reference.attend(q, self.k[:tokens], self.v[:tokens], **options)


def queries(seed, rows=1, spec=None, dtype=BF16):
    spec = {**SMALL, **(spec or {})}
    return normal(3000 + seed, rows, spec["num_query_heads"], spec["head_dim"], dtype=dtype)


# Decode.


@pytest.mark.parametrize("geometry", [
    {},
    {"num_query_heads": 2},  # Each query head has its own kv head.
    {"num_query_heads": 8, "num_kv_heads": 1},
    {"num_query_heads": 12, "num_kv_heads": 4, "head_dim": 64, "block_tokens": 16},
    {"num_query_heads": 2, "num_kv_heads": 1, "head_dim": 256, "block_tokens": 1},
    {"head_dim": 40, "block_tokens": 4},
    {"kv_dtype": np.float16},
], ids=str)
@pytest.mark.parametrize("tokens", [1, 19, 64])
def test_decode_is_the_reference(client, open_session, geometry, tokens):
    session = open_session(client, **geometry)
    context = Context(session, tokens)
    q = queries(0, 1, geometry, session.spec.kv_dtype)
    step = session.decode_step(0, [DecodeSequence(0, tokens)], q, return_lse=True)
    out, lse = context.attend(q)
    assert step.out.dtype == session.spec.kv_dtype and step.out.shape == q.shape
    assert_close(step.out, out)
    assert step.lse.dtype == np.float32
    np.testing.assert_allclose(step.lse, lse, rtol=1e-5, atol=1e-3)
    assert step.errors == (None,)
    assert step.stats.host_blocks + step.stats.hbm_blocks == len(context.block_ids)
    row_bytes = 2 * session.spec.num_kv_heads * session.spec.head_dim * 2
    assert step.stats.host_bytes + step.stats.hbm_bytes == tokens * row_bytes
    assert step.stats.total_us >= step.stats.device_us >= 0


@pytest.mark.parametrize("options", [
    AttentionOptions(scale=0.5),
    AttentionOptions(logit_softcap=2.0),
    AttentionOptions(window_tokens=5),
    AttentionOptions(window_tokens=11, sink_tokens=3),
    AttentionOptions(sink_logits=(0.5, -1.0, 2.0, float("-inf"))),
    AttentionOptions(scale=1.0, logit_softcap=5.0, window_tokens=20, sink_tokens=9, sink_logits=np.arange(4.0)),
], ids=str)
@pytest.mark.parametrize("rows", [1, 7])
def test_decode_options(client, open_session, options, rows):
    session = open_session(client)
    context = Context(session, 45)
    q = queries(1, rows)
    step = session.decode_step(
        0, [DecodeSequence(0, 45, query_tokens=rows)], q, options=options, out_dtype=np.float32, return_lse=True)
    out, lse = context.attend(
        q, scale=options.scale, logit_softcap=options.logit_softcap, window_tokens=options.window_tokens,
        sink_tokens=options.sink_tokens, sink_logits=options.sink_logits)
    assert step.out.dtype == np.float32
    assert_close(step.out, out)
    np.testing.assert_allclose(step.lse, lse, rtol=1e-5, atol=1e-3)


def test_a_batch_of_sequences_with_several_query_tokens(client, open_session):
    session = open_session(client)
    lengths, rows = [9, 64, 33, 1], [3, 1, 12, 1]
    contexts = [
        Context(session, length, sequence_id=index, first_block=10 * index, seed=index)
        for index, length in enumerate(lengths)]
    q = queries(2, sum(rows))
    sequences = [DecodeSequence(*item) for item in zip(range(4), lengths, rows)]
    step = session.decode_step(0, sequences, q, return_lse=True)
    start = 0
    for context, count in zip(contexts, rows):
        part = slice(start, start + count)
        out, lse = context.attend(q[part])
        assert_close(step.out[part], out)
        np.testing.assert_allclose(step.lse[part], lse, rtol=1e-5, atol=1e-3)
        start += count
    # A row's bits depend neither on the batch nor on query_tokens.
    alone = session.decode_step(0, [DecodeSequence(1, 64)], q[3:4], return_lse=True)
    np.testing.assert_array_equal(alone.out.view(np.uint16), step.out[3:4].view(np.uint16))
    np.testing.assert_array_equal(alone.lse, step.lse[3:4])
    last = session.decode_step(0, [DecodeSequence(2, 33)], q[15:16])
    np.testing.assert_array_equal(last.out.view(np.uint16), step.out[15:16].view(np.uint16))


def test_context_tokens_masks_the_last_block(client, open_session):
    session = open_session(client)
    context = Context(session, 32)
    q = queries(3)
    for tokens in (1, 8, 13, 31):
        step = session.decode_step(0, [DecodeSequence(0, tokens)], q)
        assert_close(step.out, context.attend(q, tokens)[0])


def test_masked_tokens_never_reach_a_result_whatever_their_bits(client, open_session):
    session = open_session(client)
    k, v = normal(4, 1, 8, 2, 32), normal(5, 1, 8, 2, 32)
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[0, 5:] = np.nan
    bad_v[0, 5:] = np.inf
    session.offload_blocks(0, [0], bad_k, bad_v)
    session.put_sequence(0, 1, [0])
    q = queries(4)
    out, _ = reference.attend(q, k[0, :5], v[0, :5])
    assert_close(session.decode_step(0, [DecodeSequence(0, 5)], q).out, out)


def test_steps_write_their_tokens(client, open_session):
    session = open_session(client)
    tokens = 20
    k, v = normal(6, tokens, KV_HEADS, HEAD_DIM), normal(7, tokens, KV_HEADS, HEAD_DIM)
    # The first 7 at once, the others one by one, with the table growing on the way.
    q = queries(5, 7)
    update = SequenceUpdate(1, [40])
    step = session.decode_step(0, [DecodeSequence(3, 7, 7, update=update)], q, k[:7], v[:7])
    assert_close(step.out, reference.attend(q, k[:7], v[:7])[0])
    for position in range(7, tokens):
        q = queries(position)
        update = SequenceUpdate(1, [40 + position // 8], position // 8) if position % 8 == 0 else None
        sequence = DecodeSequence(3, position + 1, generation=1, update=update)
        rows = slice(position, position + 1)
        step = session.decode_step(0, [sequence], q, k[rows], v[rows])
        assert_close(step.out, reference.attend(q, k[: position + 1], v[: position + 1])[0])
        # A step repeated after a lost reply gives the same bytes and changes nothing.
        again = session.decode_step(0, [sequence], q, k[rows], v[rows])
        np.testing.assert_array_equal(again.out.view(np.uint16), step.out.view(np.uint16))
    fetched = session.fetch_blocks([40, 41, 42], [0])
    np.testing.assert_array_equal(fetched.k.reshape(-1, KV_HEADS, HEAD_DIM)[:tokens].view(np.uint16), k.view(np.uint16))
    assert [block.valid_tokens for block in fetched.blocks] == [8, 8, 4]
    # The projected keys were written on the way.
    projected = session.read_projected_keys(0, [40, 41, 42])
    assert projected.predicted.all() and projected.valid_tokens.tolist() == [8, 8, 4]
    projection = reference.gaussian_projection(0, HEAD_DIM, 16)
    assert_projected(projected.keys, reference.project(fetched.k, projection), [8, 8, 4])
    # The other layer has nothing yet.
    assert session.list_sequences()[0].tokens == 0


def test_a_step_over_missing_tokens_names_them(client, open_session):
    session = open_session(client)
    Context(session, 20)
    with pytest.raises(FailedPreconditionError) as caught:
        session.decode_step(0, [DecodeSequence(0, 22)], queries(6))
    error = caught.value
    assert error.reason == "TOKENS_MISSING"
    assert (error.metadata["layer"], error.metadata["block_id"], error.metadata["position"]) == ("0", "2", "20")


def test_one_bad_sequence_does_not_fail_the_others(client, open_session):
    session = open_session(client)
    context = Context(session, 20)
    Context(session, 8, sequence_id=1, first_block=10, seed=1)
    q = queries(7, 4)
    sequences = [DecodeSequence(9, 1), DecodeSequence(0, 20), DecodeSequence(1, 8, generation=7),
                 DecodeSequence(1 + 1, 1)]
    step = session.decode_step(0, sequences, q, raise_errors=False)
    assert [error and error.reason for error in step.errors] == [
        "SEQUENCE_NOT_FOUND", None, "STALE_GENERATION", "SEQUENCE_NOT_FOUND"]
    assert isinstance(step.errors[2], AbortedError)
    assert_close(step.out[1:2], context.attend(q[1:2])[0])
    assert not step.out[[0, 2, 3]].any()
    with pytest.raises(NotFoundError) as caught:
        session.decode_step(0, sequences, q)
    assert_close(caught.value.step.out[1:2], context.attend(q[1:2])[0])


def test_a_malformed_step_fails_whole(client, open_session):
    session = open_session(client)
    Context(session, 8)
    q, k = queries(8, 2), normal(8, 2, KV_HEADS, HEAD_DIM)
    for sequences, reason in (
        ([DecodeSequence(0, 8), DecodeSequence(0, 8)], "DUPLICATE_SEQUENCE"),
        ([DecodeSequence(0, 8, 65)], "INVALID_FIELD"),
        ([], "INVALID_FIELD"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            session.decode_step(0, sequences, q, k, k)
        assert caught.value.reason == reason
    with pytest.raises(InvalidArgumentError):
        session.decode_step(0, [DecodeSequence(0, 8, 2)], q, k)  # k without v.
    for options in (AttentionOptions(scale=math.nan), AttentionOptions(logit_softcap=-1.0),
                    AttentionOptions(window_tokens=-1), AttentionOptions(sink_logits=[0.0])):
        with pytest.raises(InvalidArgumentError) as caught:
            session.decode_step(0, [DecodeSequence(0, 8, 2)], q, options=options)
        assert caught.value.reason == "INVALID_FIELD" and "options" in caught.value.metadata["field"]


def test_a_step_does_not_write_into_a_shared_block(client, open_session):
    session = open_session(client)
    Context(session, 12)
    session.fork_sequence(0, 1, 1)
    k = normal(9, 1, KV_HEADS, HEAD_DIM)
    with pytest.raises(FailedPreconditionError) as caught:
        session.decode_step(0, [DecodeSequence(1, 13)], queries(9), k, k)
    assert caught.value.reason == "BLOCK_SHARED"
    with pytest.raises(FailedPreconditionError) as caught:
        session.offload_blocks(0, [0], normal(1, 1, 8, 2, 32), normal(2, 1, 8, 2, 32))
    assert caught.value.reason == "BLOCK_SHARED"


def test_decode_stream(client, open_session):
    session = open_session(client)
    context = Context(session, 24)
    Context(session, 24, layer=1, seed=1)
    with session.decode_stream() as stream:
        q = queries(10)
        step = stream.step(0, [DecodeSequence(0, 24)], q, return_lse=True)
        assert_close(step.out, context.attend(q)[0])
        assert step.lse is not None
        # Many ahead; failures are told in their replies and the stream goes on.
        sent = [
            stream.send(layer, [DecodeSequence(0, tokens)], q, request_id=10 * tokens + layer)
            for tokens in range(1, 25) for layer in (0, 1, 2)]
        replies = [stream.receive() for _ in sent]
        assert [reply.request_id for reply in replies] == sent
        for reply in replies:
            tokens, layer = divmod(reply.request_id, 10)
            if layer == 0:
                assert_close(reply.result.out, context.attend(q, tokens)[0])
            elif layer == 2:
                assert reply.result is None and reply.error.metadata["field"] == "layer"
                assert isinstance(reply.error, InvalidArgumentError)
        with pytest.raises(EOFError):
            stream.receive()
        with pytest.raises(NotFoundError):
            stream.step(0, [DecodeSequence(5, 1)], q)
        assert stream.step(1, [DecodeSequence(0, 24)], q, step_timeout_s=60).errors == (None,)


def test_leaving_a_stream_with_steps_in_flight(client, open_session):
    session = open_session(client)
    Context(session, 64)
    with session.decode_stream() as stream:
        for _ in range(20):
            stream.send(0, [DecodeSequence(0, 64)], queries(11))
    assert session.decode_step(0, [DecodeSequence(0, 64)], queries(11)).errors == (None,)


def test_steps_run_while_other_tasks_wait(daemon):
    async def main():
        async with AsyncClient(daemon.address) as client:
            async with await client.open_session(**SMALL) as session:
                k, v = normal(12, 64, 8, 2, 32), normal(13, 64, 8, 2, 32)
                await session.offload_blocks(0, range(64), k, v)
                for index in range(8):
                    await session.put_sequence(index, 1, range(8 * index, 8 * index + 8))
                q = queries(12)
                steps = await asyncio.gather(
                    *(session.decode_step(0, [DecodeSequence(index % 8, 64)], q) for index in range(64)))
                for index, step in enumerate(steps):
                    part = slice(8 * (index % 8), 8 * (index % 8) + 8)
                    expected, _ = reference.attend(q, k[part].reshape(64, 2, 32), v[part].reshape(64, 2, 32))
                    assert_close(step.out, expected)

    asyncio.run(main())


# Projection and scores.


def assert_projected(keys, expected, valid_tokens):
    """Within 1 BF16 ulp of the float64 projection, plus what FP32 sums lose where terms cancel."""
    for block, valid in enumerate(valid_tokens):
        error = np.abs(keys[block, :, :valid].astype(np.float64) - expected[block, :, :valid])
        assert (error <= reference.bf16_ulp(expected[block, :, :valid]) + 1e-6).all(), error.max()
        assert not keys[block, :, valid:].any()


@pytest.mark.parametrize("seed, head_dim, rank", [(0, 32, 16), (7, 64, 32), (2**63 + 12345, 128, 128), (3, 40, 7)])
def test_the_projection_is_the_documented_one(client, open_session, seed, head_dim, rank):
    """Unit vectors as keys give the rows of P, bit for bit."""
    session = open_session(client, head_dim=head_dim, rank=rank, projection_seed=seed, num_kv_heads=1, block_tokens=8)
    k = np.eye(head_dim, dtype=BF16).reshape(head_dim // 8, 8, 1, head_dim)
    ids = range(head_dim // 8)
    session.offload_blocks(1, ids, k, k)
    keys = session.read_projected_keys(1, ids).keys
    assert keys.shape == (head_dim // 8, 1, 8, rank) and keys.dtype == BF16
    expected = reference.gaussian_projection(seed, head_dim, rank)
    np.testing.assert_array_equal(keys.reshape(head_dim, rank).view(np.uint16), expected.view(np.uint16))


def test_projected_keys_are_the_reference(client, open_session):
    session = open_session(client, projection_seed=5)
    k = normal(14, 6, 8, 2, 32)
    valid = [8, 8, 3, 8, 1, 8]
    session.offload_blocks(0, range(6), k, k, valid_tokens=valid)
    session.offload_blocks(0, [6], k[:1], k[:1], predict=PredictMode.OFF)
    read = session.read_projected_keys(0, range(7))
    assert read.predicted.tolist() == [True] * 6 + [False] and read.valid_tokens.tolist() == valid + [8]
    assert_projected(read.keys[:6], reference.project(k, reference.gaussian_projection(5, 32, 16)), valid)
    assert not read.keys[6].any()


@pytest.mark.parametrize("kind", list(ScoreKind))
@pytest.mark.parametrize("geometry", [{}, {"num_query_heads": 6, "num_kv_heads": 3}, {"kv_dtype": np.float16}], ids=str)
def test_scores_are_the_reference(client, open_session, kind, geometry):
    session = open_session(client, projection_seed=6, **geometry)
    spec = session.spec
    k = normal(15, 20, 8, spec.num_kv_heads, 32, dtype=spec.kv_dtype)
    valid = [8] * 19 + [3]
    session.offload_blocks(0, range(20), k, k, valid_tokens=valid)
    session.offload_blocks(0, [30], k[:1], k[:1], predict=PredictMode.OFF)
    ids = [*range(7), 30, *range(7, 20)]
    q = queries(15, 1, geometry, spec.kv_dtype)[0]
    result = session.score_blocks(0, q, block_ids=ids, kind=kind, scale=0.3, top_k=21)
    keys = session.read_projected_keys(0, range(20)).keys
    projection = reference.gaussian_projection(6, 32, 16)
    expected = reference.score(q, keys, projection, valid, kind is ScoreKind.MASS, 0.3)
    predicted = np.array(ids) != 30
    assert result.predicted.tolist() == predicted.tolist()
    np.testing.assert_allclose(result.scores[predicted], expected, rtol=1e-3, atol=1e-4)
    assert result.scores[7] == -np.inf
    if kind is ScoreKind.MASS:
        assert math.isclose(result.scores[predicted].sum(), 1, rel_tol=1e-4)
    # Best first; what is not predicted last.
    order = sorted(range(21), key=lambda index: (-result.scores[index], index))
    assert [top.index for top in result.top] == order
    assert [top.block_id for top in result.top] == [ids[index] for index in order]
    assert all(top.score == result.scores[top.index] for top in result.top)
    assert result.top[-1].index == 7 and not result.top[-1].predicted and result.top[0].predicted


def test_scores_of_a_sequence_and_the_top_alone(client, open_session):
    session = open_session(client)
    context = Context(session, 60)
    q = queries(16)[0]
    whole = session.score_blocks(0, q, sequence_id=0, top_k=3)
    listed = session.score_blocks(0, q, block_ids=context.block_ids)
    np.testing.assert_array_equal(whole.scores, listed.scores)
    assert listed.top == () and len(whole.top) == 3
    top = session.score_blocks(0, q, sequence_id=0, top_k=3, top_only=True)
    assert top.top == whole.top and top.scores.size == 0 and top.predicted.size == 0
    with pytest.raises(InvalidArgumentError):
        session.score_blocks(0, q, sequence_id=0, top_k=9)
    with pytest.raises(NotFoundError) as caught:
        session.score_blocks(0, q, sequence_id=5)
    assert caught.value.reason == "SEQUENCE_NOT_FOUND"
    with pytest.raises(ValueError):
        session.score_blocks(0, q)


# Tiles.


def test_tiles_fold_to_the_reference(client, open_session):
    session = open_session(client)
    context = Context(session, 61)
    q = queries(17, 2)
    options = AttentionOptions(sink_logits=[0.0, 1.0, -1.0, 3.0])
    run_id = session.begin_tiles(0, q, options=options, run_timeout_s=30)
    tiles = [[0, 1, 2], [3], [4, 5, 6, 7]]
    for index, ids in enumerate(tiles):
        # The second row reads the first tile alone, and 4 tokens of its last block.
        rows = [TileRow(ids), TileRow(ids, 4) if index == 0 else TileRow()]
        assert session.step_tile(run_id, index, rows)
        assert not session.step_tile(run_id, index, rows)
    with pytest.raises(FailedPreconditionError) as caught:
        session.step_tile(run_id, 4, rows)
    assert caught.value.reason == "TILE_OUT_OF_ORDER"
    result = session.finalize_tiles(run_id, out_dtype=np.float32, return_lse=True, return_state=True)
    for row, tokens in ((0, 61), (1, 20)):
        out, lse = context.attend(q[row : row + 1], tokens, sink_logits=options.sink_logits)
        assert_close(result.out[row], out[0])
        np.testing.assert_allclose(result.lse[row], lse[0], rtol=1e-5, atol=1e-3)
        # The state is without the sinks.
        out, lse = context.attend(q[row : row + 1], tokens)
        state = result.state
        np.testing.assert_allclose(state.m[row] + np.log(state.l[row]), lse[0], rtol=1e-5, atol=1e-3)
        assert_close(state.o[row] / state.l[row][:, None], out[0])
    with pytest.raises(NotFoundError) as caught:
        session.finalize_tiles(run_id)
    assert caught.value.reason == "RUN_NOT_FOUND"


def test_an_empty_run_is_zero(client, open_session):
    session = open_session(client)
    run_id = session.begin_tiles(0, queries(18, 3))
    result = session.finalize_tiles(run_id, return_lse=True, return_state=True)
    assert result.out.shape == (3, HEADS, HEAD_DIM) and not result.out.any()
    assert (result.lse == -np.inf).all() and (result.state.m == -np.inf).all()
    assert not result.state.l.any() and not result.state.o.any()


def test_runs_are_bounded_and_aborting_frees_them(client, open_session):
    session = open_session(client)
    limit = client.get_server().limits.max_tile_runs_per_session
    runs = [session.begin_tiles(0, queries(19)) for _ in range(limit)]
    with pytest.raises(ResourceExhaustedError) as caught:
        session.begin_tiles(0, queries(19), timeout_s=2)
    assert caught.value.reason == "TOO_MANY_RUNS"
    session.abort_tiles(runs[0])
    session.abort_tiles(runs[0])
    session.begin_tiles(0, queries(19))
    with pytest.raises(NotFoundError) as caught:
        session.step_tile(runs[0], 0, [TileRow()])
    assert caught.value.reason == "RUN_NOT_FOUND"


def test_tiles_refuse_windows_and_missing_blocks(client, open_session):
    session = open_session(client)
    Context(session, 8)
    with pytest.raises(InvalidArgumentError):
        session.begin_tiles(0, queries(20), options=AttentionOptions(window_tokens=4))
    run_id = session.begin_tiles(0, queries(20))
    with pytest.raises(NotFoundError) as caught:
        session.step_tile(run_id, 0, [TileRow([5])])
    assert caught.value.reason == "BLOCK_NOT_FOUND"
    with pytest.raises(InvalidArgumentError):
        session.step_tile(run_id, 0, [TileRow([0], 9)])
    with pytest.raises(InvalidArgumentError):
        session.step_tile(run_id, 0, [TileRow([0]), TileRow([0])])
    assert session.step_tile(run_id, 0, [TileRow([0])])


# Several daemons.


def test_parts_from_two_daemons_merge_to_one(start_daemon, connect, open_session):
    clients = [connect(start_daemon().address) for _ in range(2)]
    geometry = {"num_query_heads": 8, "num_kv_heads": 2, "head_dim": 64, "block_tokens": 16, "max_blocks": 40}
    one, other = (open_session(client, **geometry) for client in clients)
    k, v = normal(21, 40, 16, 2, 64), normal(22, 40, 16, 2, 64)
    one.offload_blocks(0, range(40), k, v)
    one.put_sequence(0, 1, range(40))
    one.put_sequence(1, 1, range(17))
    other.offload_blocks(0, range(23), k[17:], v[17:])
    other.put_sequence(0, 1, range(23))
    q = queries(21, 1, geometry)

    def part(session, sequence):
        step = session.decode_step(0, [sequence], q, out_dtype=np.float32, return_lse=True)
        return step.out, step.lse

    whole = part(one, DecodeSequence(0, 640))
    merged = reference.merge([part(one, DecodeSequence(1, 272)), part(other, DecodeSequence(0, 368))])
    assert_close(merged[0], whole[0].astype(np.float64))
    np.testing.assert_allclose(merged[1], whole[1], rtol=1e-5, atol=1e-3)
    exact = reference.attend(q, k.reshape(640, 2, 64), v.reshape(640, 2, 64))
    assert_close(merged[0], exact[0])
