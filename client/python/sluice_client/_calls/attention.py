"""AttentionService."""

from __future__ import annotations

from typing import Sequence

import numpy as np
import numpy.typing as npt

from sluice.v1 import attention_pb2

from .._tensors import from_wire, to_wire, wire_dtype
from ..errors import SluiceError, error_from_status
from ..types import (
    Array,
    AttentionOptions,
    DecodeResult,
    DecodeSequence,
    ProjectedKeys,
    RunningState,
    ScoreKind,
    ScoreResult,
    StepStats,
    StreamReply,
    TileRow,
    TilesResult,
    TopBlock,
)
from .call import BoundSession, Call, duration, methods
from .sequences import wire_update

# A lost reply to BeginTiles leaves a run behind, a finalized run is not found any more.
METHODS = methods(attention_pb2.DESCRIPTOR, "AttentionService", once=("BeginTiles", "FinalizeTiles"))


def score_blocks(
    session: BoundSession,
    layer: int,
    q: Array,
    *,
    block_ids: Sequence[int] | None = None,
    sequence_id: int | None = None,
    kind: ScoreKind = ScoreKind.MASS,
    scale: float | None = None,
    top_k: int = 0,
    top_only: bool = False,
    timeout_s: float | None = None,
) -> Call[ScoreResult]:
    """Scores blocks against a query by their projected keys.

    Args:
      layer: 0..num_layers-1.
      q: [num_query_heads, head_dim] of the session's kv_dtype, after RoPE.
      block_ids: what is scored, in this order; or:
      sequence_id: the blocks of this sequence, in the order of its table.
      kind: how.
      scale: MASS: logits are scale q.k. None: 1 / sqrt(head_dim).
      top_k: best blocks to name, at most as many as are scored.
      top_only: leave out scores and predicted.

    Raises:
      NotFoundError: BLOCK_NOT_FOUND, SEQUENCE_NOT_FOUND.
      InvalidArgumentError: INVALID_FIELD.
      ResourceExhaustedError: QUEUE_FULL.
    """
    if (block_ids is None) == (sequence_id is None):
        raise ValueError("give either block_ids or sequence_id")

    def parse(reply: attention_pb2.ScoreBlocksResponse) -> ScoreResult:
        return ScoreResult(
            scores=np.array(reply.scores, np.float32),
            predicted=np.array(reply.predicted, bool),
            top=tuple(TopBlock(top.index, top.block_id, top.score, top.predicted) for top in reply.top),
        )

    request = attention_pb2.ScoreBlocksRequest(
        session=session._wire_handle,
        layer=layer,
        blocks=None if block_ids is None else attention_pb2.BlockIdList(block_ids=block_ids),
        sequence_id=sequence_id,
        q=to_wire(q),
        kind=int(kind),  # type: ignore[arg-type]
        scale=scale,
        top_k=top_k,
        top_only=top_only,
    )
    return Call(METHODS["ScoreBlocks"], request, parse, timeout_s)


def read_projected_keys(
    session: BoundSession, layer: int, block_ids: Sequence[int], *, timeout_s: float | None = None
) -> Call[ProjectedKeys]:
    """Projected keys (A_g) of blocks as they are stored; zero where not predicted or behind valid_tokens."""

    def parse(reply: attention_pb2.ReadProjectedKeysResponse) -> ProjectedKeys:
        return ProjectedKeys(
            keys=from_wire(reply.projected_keys),
            predicted=np.array(reply.predicted, bool),
            valid_tokens=np.array(reply.valid_tokens, np.int64),
        )

    request = attention_pb2.ReadProjectedKeysRequest(session=session._wire_handle, layer=layer, block_ids=block_ids)
    return Call(METHODS["ReadProjectedKeys"], request, parse, timeout_s)


def _wire_options(options: AttentionOptions | None) -> attention_pb2.AttentionOptions | None:
    if options is None:
        return None
    return attention_pb2.AttentionOptions(
        scale=options.scale,
        logit_softcap=options.logit_softcap,
        window_tokens=options.window_tokens,
        sink_tokens=options.sink_tokens,
        sink_logits=[float(value) for value in options.sink_logits],
    )


def _wire_output(out_dtype: npt.DTypeLike | None, return_lse: bool) -> attention_pb2.OutputOptions:
    return attention_pb2.OutputOptions(
        dtype=None if out_dtype is None else wire_dtype(out_dtype), return_lse=return_lse
    )


def decode_request(
    session: BoundSession,
    layer: int,
    sequences: Sequence[DecodeSequence],
    q: Array,
    k: Array | None,
    v: Array | None,
    options: AttentionOptions | None,
    out_dtype: npt.DTypeLike | None,
    return_lse: bool,
) -> attention_pb2.DecodeStepRequest:
    return attention_pb2.DecodeStepRequest(
        session=session._wire_handle,
        layer=layer,
        sequences=[
            attention_pb2.DecodeSequence(
                sequence_id=sequence.sequence_id,
                generation=sequence.generation,
                query_tokens=sequence.query_tokens,
                context_tokens=sequence.context_tokens,
                update=None if sequence.update is None else wire_update(sequence.sequence_id, sequence.update),
            )
            for sequence in sequences
        ],
        q=to_wire(q),
        k=None if k is None else to_wire(k),
        v=None if v is None else to_wire(v),
        options=_wire_options(options),
        output=_wire_output(out_dtype, return_lse),
    )


def decode_result(reply: attention_pb2.DecodeStepResponse) -> DecodeResult:
    stats = reply.stats
    return DecodeResult(
        out=from_wire(reply.out),
        lse=from_wire(reply.lse) if reply.HasField("lse") else None,
        errors=tuple(error_from_status(sequence.status) for sequence in reply.sequences),
        stats=StepStats(
            hbm_blocks=stats.hbm_blocks,
            host_blocks=stats.host_blocks,
            hbm_bytes=stats.hbm_bytes,
            host_bytes=stats.host_bytes,
            queued_us=stats.queued_us,
            device_us=stats.device_us,
            total_us=stats.total_us,
        ),
    )


def checked(result: DecodeResult) -> DecodeResult:
    """The result, or the error of its first sequence that failed."""
    error: SluiceError | None = next((error for error in result.errors if error is not None), None)
    if error is not None:
        error.step = result
        raise error
    return result


def decode_step(
    session: BoundSession,
    layer: int,
    sequences: Sequence[DecodeSequence],
    q: Array,
    k: Array | None = None,
    v: Array | None = None,
    *,
    options: AttentionOptions | None = None,
    out_dtype: npt.DTypeLike | None = None,
    return_lse: bool = False,
    raise_errors: bool = True,
    timeout_s: float | None = None,
) -> Call[DecodeResult]:
    """Attention of one layer for a batch of sequences; writes the query tokens' K and V first when they are given.

    Repeating a step gives the same bytes and changes nothing.

    Args:
      layer: 0..num_layers-1.
      sequences: the batch; "rows" below is the sum of their query_tokens.
      q: [rows, num_query_heads, head_dim] of the session's kv_dtype, after RoPE.
      k: [rows, num_kv_heads, head_dim]; None (together with v): the tokens are there already.
      v: likewise.
      options: scale, softcap, window, sinks.
      out_dtype: of `out`; None: the session's kv_dtype; float32 is allowed too.
      return_lse: also return lse.
      raise_errors: raise the error of the first sequence that failed, the result being its attribute `step`. False:
        leave it to the caller to look at the result's errors.

    Raises:
      InvalidArgumentError: INVALID_FIELD, DUPLICATE_SEQUENCE, DUPLICATE_BLOCK; nothing was written.
      FailedPreconditionError: TOKENS_MISSING, BLOCK_SHARED, BASE_BEYOND_TABLE, of a sequence.
      AbortedError: STALE_GENERATION, of a sequence.
      NotFoundError: SEQUENCE_NOT_FOUND, of a sequence.
      ResourceExhaustedError: QUEUE_FULL; HOST_MEMORY, of a sequence.
    """
    request = decode_request(session, layer, sequences, q, k, v, options, out_dtype, return_lse)

    def parse(reply: attention_pb2.DecodeStepResponse) -> DecodeResult:
        return checked(decode_result(reply)) if raise_errors else decode_result(reply)

    return Call(METHODS["DecodeStep"], request, parse, timeout_s)


def stream_request(
    request_id: int, step: attention_pb2.DecodeStepRequest, step_timeout_s: float | None
) -> attention_pb2.DecodeStreamRequest:
    return attention_pb2.DecodeStreamRequest(
        request_id=request_id, timeout=None if step_timeout_s is None else duration(step_timeout_s), step=step
    )


def stream_reply(wire: attention_pb2.DecodeStreamResponse) -> StreamReply:
    error = error_from_status(wire.status)
    return StreamReply(wire.request_id, None if error else decode_result(wire.step), error)


def begin_tiles(
    session: BoundSession,
    layer: int,
    q: Array,
    *,
    options: AttentionOptions | None = None,
    run_timeout_s: float | None = None,
    timeout_s: float | None = None,
) -> Call[int]:
    """Starts a run with empty running states, for schedulers that drive tiles themselves; returns its run_id.

    Args:
      layer: 0..num_layers-1.
      q: [n, num_query_heads, head_dim] of the session's kv_dtype: n rows, 1..4,096.
      options: scale, softcap, sink_logits; no window.
      run_timeout_s: the run is freed when it was not finalized after so long, 1 ms .. 1 h. None: 60 s.

    Raises:
      ResourceExhaustedError: TOO_MANY_RUNS.
    """
    request = attention_pb2.BeginTilesRequest(
        session=session._wire_handle,
        layer=layer,
        q=to_wire(q),
        options=_wire_options(options),
        timeout=None if run_timeout_s is None else duration(run_timeout_s),
    )
    return Call(METHODS["BeginTiles"], request, lambda reply: reply.run_id, timeout_s)


def step_tile(
    session: BoundSession,
    run_id: int,
    tile_index: int,
    rows: Sequence[TileRow],
    *,
    timeout_s: float | None = None,
) -> Call[bool]:
    """Folds blocks into the running states, one TileRow per row of q; False: this tile had been folded before.

    tile_index counts from 0: the next one folds, the last one again is acknowledged and not folded again.

    Raises:
      FailedPreconditionError: TILE_OUT_OF_ORDER.
      NotFoundError: RUN_NOT_FOUND, BLOCK_NOT_FOUND.
    """
    request = attention_pb2.StepTileRequest(
        session=session._wire_handle,
        run_id=run_id,
        tile_index=tile_index,
        rows=[
            attention_pb2.TileRow(block_ids=row.block_ids, last_block_valid_tokens=row.last_block_valid_tokens)
            for row in rows
        ],
    )
    return Call(METHODS["StepTile"], request, lambda reply: reply.folded, timeout_s)


def finalize_tiles(
    session: BoundSession,
    run_id: int,
    *,
    out_dtype: npt.DTypeLike | None = None,
    return_lse: bool = False,
    return_state: bool = False,
    timeout_s: float | None = None,
) -> Call[TilesResult]:
    """The outputs of a run, which it frees; with return_state also the running states, for merging elsewhere.

    Raises:
      NotFoundError: RUN_NOT_FOUND.
    """

    def parse(reply: attention_pb2.FinalizeTilesResponse) -> TilesResult:
        return TilesResult(
            out=from_wire(reply.out),
            lse=from_wire(reply.lse) if reply.HasField("lse") else None,
            state=RunningState(from_wire(reply.state_m), from_wire(reply.state_l), from_wire(reply.state_o))
            if reply.HasField("state_m")
            else None,
        )

    request = attention_pb2.FinalizeTilesRequest(
        session=session._wire_handle,
        run_id=run_id,
        output=_wire_output(out_dtype, return_lse),
        return_state=return_state,
    )
    return Call(METHODS["FinalizeTiles"], request, parse, timeout_s)


def abort_tiles(session: BoundSession, run_id: int, *, timeout_s: float | None = None) -> Call[None]:
    """Frees a run; one that is not there is no error."""
    request = attention_pb2.AbortTilesRequest(session=session._wire_handle, run_id=run_id)
    return Call(METHODS["AbortTiles"], request, lambda reply: None, timeout_s)
