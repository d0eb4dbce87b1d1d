"""SequenceService."""

from __future__ import annotations

from typing import Sequence

from sluice.v1 import sequence_pb2

from ..types import PutSequenceResult, SequenceInfo, SequenceUpdate
from .call import BoundSession, Call, PagedCall, methods

# A released sequence is not found any more.
METHODS = methods(sequence_pb2.DESCRIPTOR, "SequenceService", once=("ReleaseSequence",))


def wire_update(sequence_id: int, update: SequenceUpdate) -> sequence_pb2.SequenceUpdate:
    return sequence_pb2.SequenceUpdate(
        sequence_id=sequence_id,
        generation=update.generation,
        base_blocks=update.base_blocks,
        block_ids=update.block_ids,
    )


def put_sequence(
    session: BoundSession,
    sequence_id: int,
    generation: int,
    block_ids: Sequence[int] = (),
    *,
    base_blocks: int = 0,
    timeout_s: float | None = None,
) -> Call[PutSequenceResult]:
    """Makes or changes a sequence's table: its first base_blocks ids plus block_ids. Repeating it changes nothing.

    An id that is not stored yet gets its slot and projected keys in every layer reserved, or all is refused.

    Args:
      sequence_id: 0..max_sequences-1.
      generation: at least 1; a higher one than the sequence's becomes its own.
      block_ids: ids that follow, 0..max_blocks-1; no id twice in one table.
      base_blocks: ids kept from the front of the table; 0 for a new sequence.

    Raises:
      AbortedError: STALE_GENERATION: lower than the sequence's own.
      FailedPreconditionError: BASE_BEYOND_TABLE.
      ResourceExhaustedError: HOST_MEMORY.
      InvalidArgumentError: INVALID_FIELD.
    """
    update = SequenceUpdate(generation=generation, block_ids=block_ids, base_blocks=base_blocks)
    return Call(
        METHODS["PutSequence"],
        sequence_pb2.PutSequenceRequest(session=session._wire_handle, update=wire_update(sequence_id, update)),
        lambda reply: PutSequenceResult(reply.num_blocks, reply.reserved_blocks),
        timeout_s,
    )


def fork_sequence(
    session: BoundSession,
    source_sequence_id: int,
    source_generation: int,
    target_sequence_id: int,
    target_generation: int = 1,
    *,
    context_tokens: int = 0,
    timeout_s: float | None = None,
) -> Call[int]:
    """Makes a sequence that shares the first context_tokens of another (0: all); no block is copied.

    Returns the length of the new table. Repeating it changes nothing.

    Raises:
      NotFoundError: SEQUENCE_NOT_FOUND.
      AlreadyExistsError: SEQUENCE_EXISTS.
      AbortedError: STALE_GENERATION: source_generation is not the source's.
    """
    return Call(
        METHODS["ForkSequence"],
        sequence_pb2.ForkSequenceRequest(
            session=session._wire_handle,
            source_sequence_id=source_sequence_id,
            source_generation=source_generation,
            target_sequence_id=target_sequence_id,
            target_generation=target_generation,
            context_tokens=context_tokens,
        ),
        lambda reply: reply.num_blocks,
        timeout_s,
    )


def truncate_sequence(
    session: BoundSession,
    sequence_id: int,
    generation: int,
    context_tokens: int,
    *,
    timeout_s: float | None = None,
) -> Call[int]:
    """Cuts a sequence to its first context_tokens, after a rejected draft say; returns the length of its table.

    generation is the one that it has afterwards, higher than its own. Blocks behind the cut leave the table and stay
    stored. Repeating it changes nothing.

    Raises:
      NotFoundError: SEQUENCE_NOT_FOUND.
      AbortedError: STALE_GENERATION.
      InvalidArgumentError: INVALID_FIELD.
    """
    return Call(
        METHODS["TruncateSequence"],
        sequence_pb2.TruncateSequenceRequest(
            session=session._wire_handle,
            sequence_id=sequence_id,
            generation=generation,
            context_tokens=context_tokens,
        ),
        lambda reply: reply.num_blocks,
        timeout_s,
    )


def release_sequences(
    session: BoundSession,
    sequence_ids: Sequence[int],
    *,
    drop_blocks: bool = False,
    timeout_s: float | None = None,
) -> Call[int]:
    """Removes tables, all or none; with drop_blocks also the blocks, in every layer, that no other table holds.

    Returns the number of blocks dropped, counted in every layer.

    Raises:
      NotFoundError: SEQUENCE_NOT_FOUND.
    """
    return Call(
        METHODS["ReleaseSequence"],
        sequence_pb2.ReleaseSequenceRequest(
            session=session._wire_handle, sequence_ids=sequence_ids, drop_blocks=drop_blocks
        ),
        lambda reply: reply.dropped_blocks,
        timeout_s,
    )


def list_sequences(session: BoundSession, *, timeout_s: float | None = None) -> PagedCall[SequenceInfo]:
    """The sequences of the session, by id."""
    return PagedCall(
        METHODS["ListSequences"],
        sequence_pb2.ListSequencesRequest(session=session._wire_handle),
        lambda reply: [
            SequenceInfo(wire.sequence_id, wire.generation, tuple(wire.block_ids), wire.tokens)
            for wire in reply.sequences
        ],
        timeout_s,
    )
