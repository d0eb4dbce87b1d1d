"""SwapService."""

from __future__ import annotations

from typing import Iterable, Sequence

import numpy as np

from sluice.v1 import swap_pb2

from .._tensors import from_wire, to_wire
from ..errors import error_from_status
from ..types import (
    Array,
    BlockInfo,
    BlockState,
    DropResult,
    FetchedBlocks,
    OffloadAck,
    OffloadBatch,
    OffloadResult,
    PredictMode,
    Tier,
)
from .call import BoundSession, Call, PagedCall, methods

# A dropped block is not found any more.
METHODS = methods(swap_pb2.DESCRIPTOR, "SwapService", once=("DropBlocks",))


def _block_info(wire: swap_pb2.BlockInfo) -> BlockInfo:
    return BlockInfo(
        layer=wire.layer,
        block_id=wire.block_id,
        state=BlockState(wire.state),
        tier=Tier(wire.tier),
        valid_tokens=wire.valid_tokens,
        predicted=wire.predicted,
        version=wire.version,
        tag=wire.tag,
        num_tables=wire.num_tables,
    )


def _block_infos(
    reply: swap_pb2.DescribeBlocksResponse | swap_pb2.ListBlocksResponse | swap_pb2.FindBlocksResponse,
) -> list[BlockInfo]:
    return [_block_info(block) for block in reply.blocks]


def _offload_result(wire: swap_pb2.OffloadBlocksResponse) -> OffloadResult:
    return OffloadResult(wire.stored_blocks, wire.predicted_blocks, wire.stored_bytes, wire.replaced_blocks)


def _offload_request(session: BoundSession, batch: OffloadBatch) -> swap_pb2.OffloadBlocksRequest:
    count = len(batch.block_ids)

    def each(name: str, value: int | Sequence[int]) -> Sequence[int]:
        values = [int(value)] * count if isinstance(value, (int, np.integer)) else [int(item) for item in value]
        if len(values) != count:
            raise ValueError(f"{name} has {len(values)} values for {count} block_ids")
        return values

    layers = each("layer", batch.layer)
    valid_tokens = each("valid_tokens", batch.valid_tokens)
    tags = batch.tags or [b""] * count
    if len(tags) != count:
        raise ValueError(f"tags has {len(tags)} values for {count} block_ids")
    return swap_pb2.OffloadBlocksRequest(
        session=session._wire_handle,
        blocks=[
            swap_pb2.OffloadBlock(layer=layer, block_id=block_id, valid_tokens=valid, tag=tag)
            for layer, block_id, valid, tag in zip(layers, batch.block_ids, valid_tokens, tags)
        ],
        k=to_wire(batch.k),
        v=to_wire(batch.v),
        predict=int(batch.predict),  # type: ignore[arg-type]
    )


def offload_blocks(
    session: BoundSession,
    layer: int | Sequence[int],
    block_ids: Sequence[int],
    k: Array,
    v: Array,
    *,
    valid_tokens: int | Sequence[int] = 0,
    tags: Sequence[bytes] = (),
    predict: PredictMode = PredictMode.REQUIRED,
    timeout_s: float | None = None,
) -> Call[OffloadResult]:
    """Stores n blocks, all or nothing; a block that is stored already is replaced.

    Args:
      layer: of all the blocks, or one per block.
      block_ids: n ids, 0..max_blocks-1; no (layer, id) twice.
      k: [n, block_tokens, num_kv_heads, head_dim] of the session's kv_dtype, after RoPE.
      v: likewise.
      valid_tokens: tokens present from the block's first, of all or per block. 0: all. What lies behind is stored as
        zero and never scored.
      tags: at most 32 bytes per block to find it by, or none.
      predict: whether projected keys are made.

    Raises:
      InvalidArgumentError: INVALID_FIELD, UNEQUAL_KV, DUPLICATE_BLOCK.
      ResourceExhaustedError: HOST_MEMORY, PREDICTION_MEMORY, QUEUE_FULL, INFLIGHT_BYTES, MESSAGE_TOO_LARGE.
      FailedPreconditionError: BLOCK_SHARED: a replaced block is in two tables.
    """
    batch = OffloadBatch(layer, block_ids, k, v, valid_tokens, tags, predict)
    return Call(METHODS["OffloadBlocks"], _offload_request(session, batch), _offload_result, timeout_s)


def offload_stream_request(session: BoundSession, batch_id: int, batch: OffloadBatch) -> swap_pb2.OffloadStreamRequest:
    return swap_pb2.OffloadStreamRequest(batch_id=batch_id, batch=_offload_request(session, batch))


def offload_ack(wire: swap_pb2.OffloadStreamResponse) -> OffloadAck:
    error = error_from_status(wire.status)
    return OffloadAck(wire.batch_id, None if error else _offload_result(wire.result), error)


def fetch_blocks(
    session: BoundSession,
    block_ids: Sequence[int],
    layers: Sequence[int] = (),
    *,
    timeout_s: float | None = None,
) -> Call[FetchedBlocks]:
    """Reads blocks back, bit for bit: layer by layer (none named: every layer), ids as listed.

    Raises:
      NotFoundError: BLOCK_NOT_FOUND naming the first that is missing, before anything is sent, or later when a block
        is dropped meanwhile.
    """

    def parse(reply: swap_pb2.FetchBlocksResponse) -> FetchedBlocks:
        return FetchedBlocks(
            blocks=tuple(_block_info(block) for block in reply.blocks), k=from_wire(reply.k), v=from_wire(reply.v)
        )

    request = swap_pb2.FetchBlocksRequest(
        session=session._wire_handle, blocks=swap_pb2.BlockSet(layers=layers, block_ids=block_ids)
    )
    return Call(METHODS["FetchBlocks"], request, parse, timeout_s)


def fetch_stream(
    session: BoundSession,
    block_ids: Sequence[int],
    layers: Sequence[int] = (),
    *,
    timeout_s: float | None = None,
) -> Call[FetchedBlocks]:
    """As fetch_blocks, in pieces of some blocks as they come. The daemon reads a bounded distance ahead of the consumer
    and holds nothing for a slow one; each block is wholly one version."""
    return fetch_blocks(session, block_ids, layers, timeout_s=timeout_s)


def join_fetched(session: BoundSession, pieces: Iterable[FetchedBlocks]) -> FetchedBlocks:
    """The pieces of a fetch as one."""
    pieces = list(pieces)
    if len(pieces) == 1:
        return pieces[0]
    spec = session.spec
    none = np.empty((0, spec.block_tokens, spec.num_kv_heads, spec.head_dim), spec.kv_dtype)
    return FetchedBlocks(
        tuple(block for piece in pieces for block in piece.blocks),
        np.concatenate([none, *(piece.k for piece in pieces)]),
        np.concatenate([none, *(piece.v for piece in pieces)]),
    )


def describe_blocks(
    session: BoundSession,
    block_ids: Sequence[int],
    layers: Sequence[int] = (),
    *,
    timeout_s: float | None = None,
) -> Call[list[BlockInfo]]:
    """What is known of blocks, layer by layer (none named: every layer), ids as listed; an absent one is no error."""
    request = swap_pb2.DescribeBlocksRequest(
        session=session._wire_handle, blocks=swap_pb2.BlockSet(layers=layers, block_ids=block_ids)
    )
    return Call(METHODS["DescribeBlocks"], request, _block_infos, timeout_s)


def list_blocks(
    session: BoundSession,
    layers: Sequence[int] = (),
    tier: Tier = Tier.UNSPECIFIED,
    *,
    timeout_s: float | None = None,
) -> PagedCall[BlockInfo]:
    """The blocks that are stored or reserved, by layer and id; only of these layers or of this tier when given."""
    request = swap_pb2.ListBlocksRequest(
        session=session._wire_handle, layers=layers, tier=int(tier)  # type: ignore[arg-type]
    )
    return PagedCall(METHODS["ListBlocks"], request, _block_infos, timeout_s)


def find_blocks(
    session: BoundSession,
    tags: Sequence[bytes],
    layers: Sequence[int] = (),
    *,
    timeout_s: float | None = None,
) -> Call[list[BlockInfo]]:
    """The stored blocks that carry one of the tags (1..32 bytes each): tag by tag, then by layer and id."""
    request = swap_pb2.FindBlocksRequest(session=session._wire_handle, tags=tags, layers=layers)
    return Call(METHODS["FindBlocks"], request, _block_infos, timeout_s)


def drop_blocks(
    session: BoundSession,
    block_ids: Sequence[int],
    layers: Sequence[int] = (),
    *,
    allow_missing: bool = False,
    timeout_s: float | None = None,
) -> Call[DropResult]:
    """Forgets blocks, all or none; in these layers (none named: every layer).

    Raises:
      NotFoundError: BLOCK_NOT_FOUND, unless allow_missing.
      FailedPreconditionError: BLOCK_IN_TABLE.
    """
    request = swap_pb2.DropBlocksRequest(
        session=session._wire_handle,
        blocks=swap_pb2.BlockSet(layers=layers, block_ids=block_ids),
        allow_missing=allow_missing,
    )
    return Call(
        METHODS["DropBlocks"], request, lambda reply: DropResult(reply.dropped_blocks, reply.freed_bytes), timeout_s
    )
